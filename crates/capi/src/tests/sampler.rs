//! Samplers: chains, the program's own, and grammars.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_void};

use super::scene::{LoadedModel, N_VOCAB, Scene, Text};
use crate::abi::{ChainParams, DEFAULT_SEED, TokenBias, TokenData, TokenDataArray};
use crate::defaults::llama_sampler_chain_default_params;
use crate::ffi::{Handle, In, Out};
use crate::sampler::{
    Interface, Sampler, llama_sampler_apply, llama_sampler_clone, llama_sampler_copy,
    llama_sampler_free, llama_sampler_get_seed, llama_sampler_init, llama_sampler_name,
    llama_sampler_sample,
};

/// The tokens 0.. with these logits.
fn tokens(logits: &[f32]) -> Vec<TokenData> {
    let of = |(id, &logit)| TokenData { id, logit, p: 0.0 };
    (0..).zip(logits).map(of).collect()
}

/// What a sampler leaves of them, in its order, and what it chooses.
fn applied(sampler: Handle<Sampler>, logits: &[f32]) -> (Vec<i32>, i64) {
    let mut tokens = tokens(logits);
    let mut array = TokenDataArray {
        data: tokens.as_mut_ptr(),
        size: tokens.len(),
        selected: -1,
        sorted: false,
    };
    llama_sampler_apply(sampler, Out::of(&raw mut array));
    let kept = In::of(array.data.cast_const()).slice(array.size);
    (kept.iter().map(|token| token.id).collect(), array.selected)
}

const LOGITS: [f32; 5] = [0.5, 3.0, -1.0, 2.5, 2.9];

#[test]
fn truncations_keep_what_they_should() {
    use crate::sampler::narrow::{
        llama_sampler_init_min_p, llama_sampler_init_top_k, llama_sampler_init_top_p,
    };
    let kept = |sampler| {
        let (kept, selected) = applied(sampler, &LOGITS);
        assert_eq!(selected, -1);
        llama_sampler_free(sampler);
        kept
    };
    assert_eq!(kept(llama_sampler_init_top_k(2)), [1, 4]);
    assert_eq!(kept(llama_sampler_init_top_k(0)), [0, 1, 2, 3, 4]);
    // The probabilities are 0.385, 0.348, 0.234, 0.032, 0.007.
    assert_eq!(kept(llama_sampler_init_top_p(0.5, 1)), [1, 4]);
    assert_eq!(kept(llama_sampler_init_top_p(0.1, 3)), [1, 4, 3]);
    assert_eq!(kept(llama_sampler_init_min_p(0.8, 1)), [1, 4]);
    assert_eq!(kept(llama_sampler_init_min_p(0.8, 3)), [1, 4, 3]);
}

#[test]
fn a_chain_owns_its_samplers() {
    use crate::sampler::chain::{
        llama_sampler_chain_add, llama_sampler_chain_get, llama_sampler_chain_init,
        llama_sampler_chain_n, llama_sampler_chain_remove,
    };
    use crate::sampler::narrow::llama_sampler_init_top_k;
    use crate::sampler::pick::{llama_sampler_init_dist, llama_sampler_init_greedy};
    let chain = llama_sampler_chain_init(llama_sampler_chain_default_params());
    let [top, dist, greedy] = [
        llama_sampler_init_top_k(3),
        llama_sampler_init_dist(7),
        llama_sampler_init_greedy(),
    ];
    for sampler in [top, dist, greedy] {
        llama_sampler_chain_add(chain, sampler);
    }
    assert_eq!(llama_sampler_chain_n(chain), 3);
    assert!(llama_sampler_chain_get(chain, -1) == chain);
    assert!(llama_sampler_chain_get(chain, 1) == dist);
    assert!(llama_sampler_chain_get(chain, 3).is_null());
    assert!(llama_sampler_chain_get(top, -1).is_null(), "no chain");
    assert_eq!(llama_sampler_get_seed(chain), 7);
    assert_eq!(llama_sampler_get_seed(top), DEFAULT_SEED);
    let copy = llama_sampler_clone(chain);
    assert_eq!(applied(copy, &LOGITS), (vec![1, 4, 3], 0));
    assert!(llama_sampler_chain_remove(chain, 1) == dist);
    assert_eq!(llama_sampler_chain_n(chain), 2);
    llama_sampler_copy(copy, chain);
    assert_eq!(llama_sampler_chain_n(chain), 3);
    // SAFETY: the name is a constant of the library's.
    let name = unsafe { CStr::from_ptr(llama_sampler_name(chain)) };
    assert_eq!(name, c"chain");
    for sampler in [copy, chain, dist] {
        llama_sampler_free(sampler);
    }
    assert!(top.get().is_none(), "freed with its chain");
}

/// How often a sampler of the program's was called.
#[derive(Default)]
struct Calls {
    applied: Cell<u32>,
    accepted: Cell<i32>,
    freed: Cell<u32>,
}

extern "C" fn name(_sampler: Handle<Sampler>) -> *const c_char {
    c"mine".as_ptr()
}

fn calls<'a>(sampler: Handle<Sampler>) -> &'a Calls {
    In::of(
        sampler
            .get()
            .unwrap()
            .ctx
            .get()
            .cast::<Calls>()
            .cast_const(),
    )
    .get()
    .unwrap()
}

extern "C" fn accept(sampler: Handle<Sampler>, token: i32) {
    calls(sampler).accepted.set(token);
}

extern "C" fn apply(sampler: Handle<Sampler>, array: Out<TokenDataArray>) {
    let calls = calls(sampler);
    calls.applied.set(calls.applied.get() + 1);
    array.get().unwrap().selected = 2;
}

extern "C" fn free(sampler: Handle<Sampler>) {
    calls(sampler).freed.set(calls(sampler).freed.get() + 1);
}

#[test]
fn a_program_brings_a_sampler_of_its_own() {
    use crate::sampler::chain::{llama_sampler_chain_add, llama_sampler_chain_init};
    let interface = Interface {
        name: Some(name),
        accept: Some(accept),
        apply: Some(apply),
        reset: None,
        clone: None,
        free: Some(free),
        backend_init: std::ptr::null(),
        backend_accept: std::ptr::null(),
        backend_apply: std::ptr::null(),
        backend_set_input: std::ptr::null(),
        backend_reset: std::ptr::null(),
        copy_state: None,
    };
    let calls = Calls::default();
    let scene = Scene::new(|_| ());
    assert_eq!(scene.decode(0, 0, &[5, 6]), 0);
    let mine = llama_sampler_init(
        &raw const interface,
        (&raw const calls).cast_mut().cast::<c_void>(),
    );
    let chain = llama_sampler_chain_init(ChainParams { no_perf: false });
    llama_sampler_chain_add(chain, mine);
    assert_eq!(llama_sampler_sample(chain, scene.context, -1), 2);
    assert_eq!((calls.applied.get(), calls.accepted.get()), (1, 2));
    assert!(llama_sampler_clone(mine).is_null(), "it cannot be cloned");
    assert_eq!(crate::sampler::chain::llama_perf_sampler(chain).n_sample, 1);
    llama_sampler_free(chain);
    assert_eq!(calls.freed.get(), 1);
}

#[test]
fn greedy_takes_the_largest_logit_of_a_context() {
    use crate::sampler::pick::llama_sampler_init_greedy;
    let scene = Scene::new(|_| ());
    assert_eq!(scene.decode(0, 0, &[5, 6]), 0);
    let logits = scene.logits(-1).unwrap();
    let best = (0..N_VOCAB).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
    let sampler = llama_sampler_init_greedy();
    let token = llama_sampler_sample(sampler, scene.context, -1);
    assert_eq!(usize::try_from(token).ok(), best);
    assert_eq!(
        llama_sampler_sample(sampler, scene.context, 0),
        -1,
        "no output there"
    );
    llama_sampler_free(sampler);
}

/// The tokens that a sampler allows.
fn allowed(sampler: Handle<Sampler>) -> Vec<i32> {
    let mut all = tokens(&[0.0; N_VOCAB]);
    let mut array = TokenDataArray {
        data: all.as_mut_ptr(),
        size: all.len(),
        selected: -1,
        sorted: false,
    };
    llama_sampler_apply(sampler, Out::of(&raw mut array));
    let tokens = all.iter().filter(|token| token.logit == 0.0);
    tokens.map(|token| token.id).collect()
}

#[test]
fn a_grammar_holds_from_its_trigger_on() {
    use crate::sampler::grammar::{
        llama_sampler_init_grammar, llama_sampler_init_grammar_lazy_patterns,
    };
    use crate::sampler::llama_sampler_accept;
    let model = LoadedModel::new();
    let [grammar, root, other, wrong] =
        ["start ::= \"a\" [0-9] \"b\"", "start", "root", "root ::= ("].map(Text::new);
    let held = llama_sampler_init_grammar(model.0, grammar.get(), root.get());
    let first = allowed(held);
    assert!(!first.is_empty() && first.len() < 8, "{first:?}");
    assert!(llama_sampler_init_grammar(model.0, grammar.get(), other.get()).is_null());
    assert!(llama_sampler_init_grammar(model.0, wrong.get(), other.get()).is_null());

    let patterns = [Text::new(r"[\s\S]*?(a)[\s\S]*")];
    let pointers = patterns.each_ref().map(Text::as_ptr);
    let lazy = llama_sampler_init_grammar_lazy_patterns(
        model.0,
        grammar.get(),
        root.get(),
        In::of(pointers.as_ptr()),
        1,
        In::of(std::ptr::null()),
        0,
    );
    assert_eq!(allowed(lazy).len(), N_VOCAB, "nothing has begun it");
    let id = |text: &str| {
        let tokenizer = model.0.get().unwrap().shared.tokenizer.clone().unwrap();
        tokenizer.token_id(text).unwrap().0 as i32
    };
    llama_sampler_accept(lazy, id("o"));
    assert_eq!(allowed(lazy).len(), N_VOCAB);
    llama_sampler_accept(lazy, id("a"));
    let begun = allowed(lazy);
    assert!(
        !begun.is_empty() && begun.len() < 20,
        "a digit alone: {begun:?}"
    );
    let copy = llama_sampler_clone(lazy);
    assert_eq!(allowed(copy), begun);
    for sampler in [held, lazy, copy] {
        llama_sampler_free(sampler);
    }
}

#[test]
fn biases_and_penalties_change_logits_by_token() {
    use crate::sampler::change::{llama_sampler_init_logit_bias, llama_sampler_init_penalties};
    use crate::sampler::llama_sampler_accept;
    let changed = |sampler: Handle<Sampler>| {
        let mut tokens = tokens(&[2.0, -2.0, 1.0]);
        let mut array = TokenDataArray {
            data: tokens.as_mut_ptr(),
            size: 3,
            selected: -1,
            sorted: false,
        };
        llama_sampler_apply(sampler, Out::of(&raw mut array));
        llama_sampler_free(sampler);
        tokens.iter().map(|token| token.logit).collect::<Vec<_>>()
    };
    let bias = TokenBias {
        token: 1,
        bias: 5.0,
    };
    let biased = llama_sampler_init_logit_bias(3, 1, In::of(&raw const bias));
    assert_eq!(changed(biased), [2.0, 3.0, 1.0]);
    let penalised = llama_sampler_init_penalties(3, 2, 2.0, 0.5, 0.25);
    for token in [2, 0, 1, 1] {
        llama_sampler_accept(penalised, token);
    }
    // Only the last two count: token 1, twice.
    assert_eq!(changed(penalised), [2.0, -4.0 - 1.0 - 0.25, 1.0]);
}
