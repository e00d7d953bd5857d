//! Where the messages of a chat end in the tokens of its prompt.
//!
//! Other prompts are likely to part there: the next user has the same system message, and an edited
//! conversation its first messages. Invariant: a number is one of tokens that both, the prompt and
//! the text of the first messages alone, begin with. Knows no template.

use kv_core::TokenId;

use crate::tokenizer::{AddSpecial, EncodeOptions, Tokenizer};

/// Messages before the last one whose ends are looked for, in addition to that of system messages.
const MAX_ENDS: usize = 8;

/// The number of a prompt's tokens that belong to each of some beginnings of its messages, whose
/// roles these are. `render` gives the text of so many first messages alone, or `None` where the
/// template refuses them without the others. Those after the first beginning that is not encoded as
/// in the prompt are left out.
pub fn message_ends<'r>(
    tokenizer: &Tokenizer,
    prompt: &[TokenId],
    roles: impl IntoIterator<Item = &'r str>,
    render: impl Fn(usize) -> Option<String>,
) -> Vec<usize> {
    let mut ends = Vec::new();
    let (mut before, mut at) = (String::new(), 0);
    for text in beginnings(roles).into_iter().filter_map(render) {
        let Some(new) = text.strip_prefix(before.as_str()) else {
            break;
        };
        let options = match at {
            0 => EncodeOptions::CHAT,
            _ => EncodeOptions {
                add: AddSpecial::Never,
                ..EncodeOptions::CHAT
            },
        };
        // Only what is new is encoded: together no more than the prompt.
        let tokens = tokenizer.encode(new, options);
        let rest = prompt.get(at..).unwrap_or_default();
        let n_common = tokens.iter().zip(rest).take_while(|(a, b)| a == b).count();
        at += n_common;
        ends.push(at);
        if n_common < tokens.len() {
            break;
        }
        before = text;
    }
    ends.retain(|&end| end > 0 && end < prompt.len());
    ends.dedup();
    ends
}

/// Of how many first messages the ends are worth looking for: those before the last message, and
/// the system messages at the beginning. `roles` are those of all messages.
fn beginnings<'r>(roles: impl IntoIterator<Item = &'r str>) -> Vec<usize> {
    let roles: Vec<&str> = roles.into_iter().collect();
    let n = roles.len();
    let is_system = |role: &&&str| matches!(**role, "system" | "developer");
    let n_system = roles.iter().take_while(is_system).count();
    let last = (n_system + 1).max(n.saturating_sub(MAX_ENDS))..n;
    let system = (1..n).contains(&n_system).then_some(n_system);
    system.into_iter().chain(last).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_messages_and_the_system_messages_are_looked_at() {
        let of = |roles: &[&'static str]| beginnings(roles.iter().copied());
        assert!(of(&[]).is_empty());
        assert!(of(&["user"]).is_empty());
        assert_eq!(of(&["system", "user"]), [1]);
        assert_eq!(of(&["user", "assistant", "user"]), [1, 2]);
        let mut long = vec!["system", "developer"];
        long.extend(["user", "assistant"].repeat(10));
        assert_eq!(of(&long), [2, 14, 15, 16, 17, 18, 19, 20, 21]);
    }
}
