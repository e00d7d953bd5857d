//! Encoder-decoders: logits of texts over their sources are those of transformers.

use cellar_engine::{Engine, EngineConfig};
use kv_backend::Backend;
use kv_core::{
    SeqId, TokenId,
    batch::{Batch, TokensOf},
};
use kv_rows::KvType;
use model_tests::{Recipe, distance, fixture};

use super::encoders::registry;

/// Texts of a recipe, each with its source.
const N_TEXTS: usize = 3;

/// Three sources in one batch, then their texts in one batch but for the last token of each, then
/// these.
pub(crate) fn logits_agree<B: Backend>(backend: B, name: &str, tolerance: f32) {
    let recipe = Recipe::open(&fixture("seq2seq").join(name));
    let directory = recipe.directory(&registry()).unwrap();
    let reference = recipe.reference();
    let ids = |of: &str, at: usize| -> Vec<TokenId> {
        let ids = reference.ids(&format!("{of}_ids_{at}")).unwrap();
        ids.into_iter().map(TokenId).collect()
    };
    let config = EngineConfig {
        n_ctx: Some(128),
        n_seqs: N_TEXTS as u32,
        kv_types: KvType::F32.into(),
        ..EngineConfig::default()
    };
    let (model, weights) = (directory.model().clone(), directory.weights().clone());
    let n_vocab = model.vocab_size();
    let mut engine = Engine::new(backend, model, weights, &config).unwrap();
    let (mut sources, mut texts, mut last) = (Batch::new(), Batch::new(), Batch::new());
    sources.set_tokens_of(TokensOf::Source);
    for (at, seq) in (0..N_TEXTS).zip((0..).map(SeqId)) {
        for id in ids("enc", at) {
            sources.push_token(id).in_sequence(seq);
        }
        let text = ids("dec", at);
        for (i, &id) in text.iter().enumerate() {
            let batch = if i + 1 == text.len() {
                &mut last
            } else {
                &mut texts
            };
            batch.push_token(id).in_sequence(seq).with_output();
        }
    }
    engine.encode(&sources).unwrap();
    let texts = engine.decode(&texts).unwrap().values().to_vec();
    let last = engine.decode(&last).unwrap().values().to_vec();
    let (mut texts, mut last) = (texts.chunks(n_vocab), last.chunks(n_vocab));
    for at in 0..N_TEXTS {
        let n = ids("dec", at).len();
        let rows: Vec<&[f32]> = texts.by_ref().take(n - 1).chain(last.next()).collect();
        let kept = reference.ids(&format!("rows_{at}")).unwrap();
        let kept = kept.iter().flat_map(|&row| rows[row as usize]);
        let kept: Vec<f32> = kept.copied().collect();
        let (_, wanted) = reference.values(&format!("logits_{at}")).unwrap();
        let off = distance(&kept, &wanted);
        assert!(off <= tolerance, "{name}, text {at}: off by {off}");
    }
}
