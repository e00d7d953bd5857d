//! [`SharingHead`]: a head of several layers that attends over its model's keys and values (the
//! assistants of Gemma 4).
//!
//! Each layer attends over the rows of a layer of the model. It reads the embedding of a token, as
//! the model scales it, next to the final row of the token before, and gives a row in place of that
//! one to go on from. It stores nothing: all tokens of a draft stand at the position of the first,
//! and see what is before it. Its logits may be those of the tokens of a few groups, which it
//! chooses by further logits. Invariant: its graph stores nothing. Knows no architecture by name.

use std::sync::Arc;

use kv_core::TokenId;
use kv_graph::{Graph, GraphBuilder, GraphError, GraphShape, Input};

use super::decoder::{scaled, wanted_rows};
use super::{Decoder, DraftHead, LayerContext, OWN_HEAD};

/// A head that attends over its model's keys and values.
#[derive(Clone, Debug, PartialEq)]
pub struct SharingHead {
    /// The settings of its layers, which [`DraftHead::layers`] has.
    pub decoder: Decoder,
    /// The groups of tokens that it chooses from, where it does.
    pub groups: Option<TokenGroups>,
}

/// Groups of tokens, of which a head chooses some: its next token is one of theirs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenGroups {
    /// All tokens, those of a group one after the other.
    pub tokens: Arc<[TokenId]>,
    /// Number of groups, all of the same size.
    pub n_groups: usize,
    /// Groups that are chosen.
    pub n_chosen: usize,
}

impl TokenGroups {
    /// The likeliest token of the groups with the greatest logits `of_groups`, by the logits of all
    /// tokens; `None` where there is none with a number.
    pub fn likeliest(&self, of_groups: &[f32], logits: &[f32]) -> Option<TokenId> {
        let known = self.chosen(of_groups).filter_map(|token| {
            let logit = *logits.get(token.0 as usize)?;
            (!logit.is_nan()).then_some((logit, token))
        });
        let best = known.max_by(|(a, _), (b, _)| a.total_cmp(b));
        best.map(|(_, token)| token)
    }

    /// The tokens of the groups with the greatest logits, of which `logits` has one for each group.
    fn chosen(&self, logits: &[f32]) -> impl Iterator<Item = TokenId> {
        let mut groups: Vec<usize> = (0..self.n_groups.min(logits.len())).collect();
        // Of equal ones the first.
        groups.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        groups.truncate(self.n_chosen);
        let size = self.tokens.len() / self.n_groups.max(1);
        let of_group =
            move |group: usize| (group * size..(group + 1) * size).map(|at| self.tokens[at]);
        groups.into_iter().flat_map(of_group)
    }
}

impl SharingHead {
    /// The computation of the head as [`DraftHead::graph`] says; behind logits and rows, logits of
    /// groups where it has such.
    pub(super) fn graph(
        &self,
        head: &DraftHead,
        of: &Decoder,
        shape: GraphShape,
    ) -> Result<Graph, GraphError> {
        let mut b = GraphBuilder::new(shape);
        let own = &self.decoder;
        let name = |what: &str| format!("{OWN_HEAD}{what}");
        let tokens = b.input(Input::Tokens)?;
        let rows = b.input(Input::Embeddings { dim: of.dim })?;
        let embedded = b.embed("head_embd", tokens, &head.embedding, [of.vocab, of.dim])?;
        let embedded = scaled(&mut b, "head_scaled", embedded, of.multipliers.embedding)?;
        let both = b.concat("head_both", embedded, rows)?;
        let mut x = b.linear("head_inp", both, &name("pre_projection.weight"), own.dim)?;
        for (number, layer) in head.layers.iter().enumerate() {
            let mut at = of.place_of(of.layers.len() + number);
            if number + 1 == head.layers.len() {
                at = LayerContext {
                    output_rows: wanted_rows(&mut b)?,
                    ..at
                };
            }
            let b = &mut b.scope(at.layer);
            x = own.layer(b, at, layer, [x, x])?;
            x = layer.scale.build(b, x)?;
        }
        let x = own.norm.build(&mut b, "head_norm", x, &head.last_norm)?;
        let logits = b.linear("head_output", x, &head.output_weight, of.vocab)?;
        let rows = b.linear("head_rows", x, &name("post_projection.weight"), of.dim)?;
        let mut outputs = vec![logits, rows];
        if let Some(groups) = &self.groups {
            let weight = name("centroids.weight");
            outputs.push(b.linear("head_groups", x, &weight, groups.n_groups)?);
        }
        b.finish(&outputs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tokens_of_the_best_groups_are_chosen() {
        let groups = TokenGroups {
            tokens: [5, 4, 3, 2, 1, 0].map(TokenId).into(),
            n_groups: 3,
            n_chosen: 2,
        };
        let chosen = |logits: &[f32]| groups.chosen(logits).map(|t| t.0).collect::<Vec<_>>();
        assert_eq!(chosen(&[0.5, -1.0, 2.0]), [1, 0, 5, 4]);
        assert_eq!(chosen(&[1.0, 1.0, 1.0]), [5, 4, 3, 2]);
        assert!(chosen(&[]).is_empty());
        let logits = [9.0, 1.0, 8.0, 7.0, 2.0, f32::NAN];
        let likeliest = groups.likeliest(&[0.5, -1.0, 2.0], &logits);
        assert_eq!(likeliest, Some(TokenId(0)));
        assert_eq!(
            groups.likeliest(&[2.0, 1.0, 0.5], &logits),
            Some(TokenId(2))
        );
        assert_eq!(groups.likeliest(&[], &logits), None);
    }
}
