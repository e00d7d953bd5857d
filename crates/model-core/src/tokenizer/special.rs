//! Finds special tokens in text before anything else reads it.
//!
//! Invariant: the fragments are in the order of the text and cover it, but for white space that is
//! stripped after a token. Longer tokens win over shorter ones wherever they are, and of one token
//! the leftmost match wins: the result of cutting the text at one token after another, the longest
//! first. Work is proportional to the text and to the matches in it, not to the number of tokens.

use kv_core::TokenId;

use super::vocab::Vocab;
use super::{SpecialSpacing, TokenKind};

/// The reading of marks in the text: as the tokens they spell, or as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialText {
    /// `<|im_end|>` in the text is that token: for text that a program wrote, such as a chat
    /// template.
    Parse,
    /// Control and unknown tokens are never found: for text that a stranger wrote. User-defined
    /// tokens are found all the same.
    AsText,
}

/// A part of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fragment<'t> {
    Text(&'t str),
    Token(TokenId),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MatchCondition {
    Always,
    Parsing,
}

#[derive(Clone, Debug)]
struct Special {
    id: TokenId,
    len: usize,
    when: MatchCondition,
    spacing: SpecialSpacing,
}

#[derive(Clone, Debug, Default)]
struct Node {
    /// The next node for each byte, in the order of the bytes.
    next: Vec<(u8, usize)>,
    /// Index in `SpecialMatcher::tokens` of the token that ends here.
    token: Option<usize>,
}

/// All special tokens of a vocabulary.
#[derive(Clone, Debug)]
pub(super) struct SpecialMatcher {
    /// The longest first.
    tokens: Vec<Special>,
    nodes: Vec<Node>,
}

/// A match that stands.
struct SpecialMatch {
    start: usize,
    id: TokenId,
    resume: usize,
}

impl SpecialMatcher {
    pub(super) fn new(vocab: &Vocab, spacing: SpecialSpacing) -> Self {
        let mut specials: Vec<(&str, Special)> = Vec::new();
        for (id, text, kind) in vocab.iter() {
            let when = match kind {
                TokenKind::UserDefined => MatchCondition::Always,
                TokenKind::Control | TokenKind::Unknown => MatchCondition::Parsing,
                _ => continue,
            };
            let spacing = match text {
                "<unk>" | "<s>" | "<|endoftext|>" => SpecialSpacing::Keep,
                _ => spacing,
            };
            specials.push((
                text,
                Special {
                    id,
                    len: text.len(),
                    when,
                    spacing,
                },
            ));
        }
        specials.sort_by_key(|(text, special)| (std::cmp::Reverse(text.len()), special.id));
        let mut matcher = Self {
            tokens: Vec::new(),
            nodes: vec![Node::default()],
        };
        for (text, special) in specials {
            let at = matcher.insert(text.as_bytes());
            matcher.nodes[at].token = Some(matcher.tokens.len());
            matcher.tokens.push(special);
        }
        matcher
    }

    fn insert(&mut self, text: &[u8]) -> usize {
        let mut at = 0;
        for &byte in text {
            at = match self.nodes[at].next.binary_search_by_key(&byte, |&(b, _)| b) {
                Ok(slot) => self.nodes[at].next[slot].1,
                Err(slot) => {
                    let new = self.nodes.len();
                    self.nodes.push(Node::default());
                    self.nodes[at].next.insert(slot, (byte, new));
                    new
                }
            };
        }
        at
    }

    /// Cuts `text` at its special tokens.
    pub(super) fn split<'t>(&self, text: &'t str, special: SpecialText) -> Vec<Fragment<'t>> {
        let mut fragments = Vec::new();
        let mut at = 0;
        for found in self.standing_matches(text, special) {
            push_text(&mut fragments, &text[at..found.start]);
            fragments.push(Fragment::Token(found.id));
            at = found.resume;
        }
        push_text(&mut fragments, &text[at..]);
        fragments
    }

    fn standing_matches(&self, text: &str, special: SpecialText) -> Vec<SpecialMatch> {
        let mut matches = self.all_matches(text.as_bytes(), special);
        if matches.is_empty() {
            return Vec::new();
        }
        matches.sort_unstable();
        let mut taken = vec![false; text.len()];
        let mut standing = Vec::new();
        for (index, start) in matches {
            let token = &self.tokens[index];
            let end = start + token.len;
            // What is taken was taken by longer or equal tokens, so it covers an end of this one.
            if taken[start] || taken[end - 1] {
                continue;
            }
            let mut resume = end;
            if token.spacing == SpecialSpacing::Strip {
                let is_free_space = |(byte, taken): (u8, &bool)| !taken && is_space(byte);
                let behind = text.bytes().skip(end).zip(&taken[end..]);
                resume += behind.take_while(|&pair| is_free_space(pair)).count();
            }
            taken[start..resume].fill(true);
            standing.push(SpecialMatch {
                start,
                id: token.id,
                resume,
            });
        }
        standing.sort_unstable_by_key(|found| found.start);
        standing
    }

    /// Every match of every token as (index of the token, start), overlaps included.
    fn all_matches(&self, text: &[u8], special: SpecialText) -> Vec<(usize, usize)> {
        let mut matches = Vec::new();
        for start in 0..text.len() {
            let mut at = 0;
            for &byte in &text[start..] {
                let next = &self.nodes[at].next;
                match next.binary_search_by_key(&byte, |&(b, _)| b) {
                    Ok(slot) => at = next[slot].1,
                    Err(_) => break,
                }
                if let Some(index) = self.nodes[at].token
                    && (special == SpecialText::Parse
                        || self.tokens[index].when == MatchCondition::Always)
                {
                    matches.push((index, start));
                }
            }
        }
        matches
    }
}

fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t'..=b'\r')
}

fn push_text<'t>(fragments: &mut Vec<Fragment<'t>>, text: &'t str) {
    if !text.is_empty() {
        fragments.push(Fragment::Text(text));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::TokenizerModel;
    use super::*;

    fn matcher(tokens: &[(&str, TokenKind)], spacing: SpecialSpacing) -> SpecialMatcher {
        let texts = tokens.iter().map(|(t, _)| (*t).to_owned()).collect();
        let kinds = tokens.iter().map(|&(_, kind)| kind).collect();
        SpecialMatcher::new(
            &Vocab::new(TokenizerModel::Bpe, texts, kinds).unwrap(),
            spacing,
        )
    }

    const TOKENS: &[(&str, TokenKind)] = &[
        ("<a>", TokenKind::Control),
        ("<a><b>", TokenKind::Control),
        ("><", TokenKind::UserDefined),
        ("  ", TokenKind::UserDefined),
        ("plain", TokenKind::Normal),
    ];

    #[test]
    fn the_longest_wins_wherever_it_is() {
        let m = matcher(TOKENS, SpecialSpacing::Keep);
        let token = |id| Fragment::Token(TokenId(id));
        let found = m.split("x<a><a><b>plain", SpecialText::Parse);
        let expected = [
            Fragment::Text("x"),
            token(0),
            token(1),
            Fragment::Text("plain"),
        ];
        assert_eq!(found, expected);
        let found = m.split("<a><a>   é", SpecialText::AsText);
        let expected = [
            Fragment::Text("<a"),
            token(2),
            Fragment::Text("a>"),
            token(3),
            Fragment::Text(" é"),
        ];
        assert_eq!(found, expected);
        assert_eq!(m.split("", SpecialText::Parse), []);
    }

    #[test]
    fn white_space_after_a_token_is_stripped_where_asked() {
        let tokens = [("<|end|>", TokenKind::Control), ("<s>", TokenKind::Control)];
        let m = matcher(&tokens, SpecialSpacing::Strip);
        let found = m.split("<s> a<|end|> \n b<|end|> ", SpecialText::Parse);
        let token = |id| Fragment::Token(TokenId(id));
        let text = Fragment::Text;
        assert_eq!(found, [token(1), text(" a"), token(0), text("b"), token(0)]);
    }

    /// The definition: cut at one token after another, the longest first.
    fn by_definition(text: &str, special: SpecialText) -> Vec<Fragment<'_>> {
        let mut order: Vec<usize> = (0..TOKENS.len()).collect();
        order.sort_by_key(|&i| std::cmp::Reverse(TOKENS[i].0.len()));
        let mut parts = Vec::new();
        push_text(&mut parts, text);
        for i in order {
            let (needle, kind) = TOKENS[i];
            let wanted = match kind {
                TokenKind::Control => special == SpecialText::Parse,
                kind => kind == TokenKind::UserDefined,
            };
            if !wanted {
                continue;
            }
            let mut next = Vec::new();
            for part in parts {
                let Fragment::Text(mut rest) = part else {
                    next.push(part);
                    continue;
                };
                while let Some(at) = rest.find(needle) {
                    push_text(&mut next, &rest[..at]);
                    next.push(Fragment::Token(TokenId(u32::try_from(i).unwrap())));
                    rest = &rest[at + needle.len()..];
                }
                push_text(&mut next, rest);
            }
            parts = next;
        }
        parts
    }

    proptest! {
        #[test]
        fn equals_the_definition(text in "[<>ab é ]{0,40}") {
            let m = matcher(TOKENS, SpecialSpacing::Keep);
            for special in [SpecialText::Parse, SpecialText::AsText] {
                prop_assert_eq!(m.split(&text, special), by_definition(&text, special));
            }
        }
    }
}
