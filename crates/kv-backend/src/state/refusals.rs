//! One test for each error of a state: what is refused, and with which words. All checksums are
//! right unless they are what is wrong.

#![allow(clippy::unwrap_used)] // a test

use kv_core::{
    ids::{LayerIdx, SeqId, TokenId},
    layers::{AttentionMemory, LayerMap, LayerMemory, RecurrentMemory},
    memory::{Memory, Seqs, SnapshotError},
    window::Window,
};
use kv_rows::{KvType, RowLayout};
use serde_json::{Value, json};

use super::frame::Tag;
use super::tests::{fingerprint, framed, layers, memory, sections, state};
use super::write::{META, PART, ROWS, STATES, TOKENS};
use super::xxh64::xxh64;
use super::{SavedState, SeqTokens, StateError, StateToSave, save};
use crate::{BackendError, RowKind};

type Sections = Vec<(Tag, Vec<u8>)>;

/// Why a state with other sections is refused.
fn refused(change: impl FnOnce(&mut Sections)) -> StateError {
    let mut all = sections(&state());
    change(&mut all);
    SavedState::parse(&framed(&all)).unwrap_err()
}

/// The `number`-th payload with a tag.
fn payload(all: &mut Sections, tag: Tag, number: usize) -> &mut Vec<u8> {
    let mut own = all.iter_mut().filter(|(other, _)| *other == tag);
    &mut own.nth(number).unwrap().1
}

fn position(all: &Sections, tag: Tag) -> usize {
    all.iter().position(|(other, _)| *other == tag).unwrap()
}

/// Why a state with another number at a place of a section is refused.
fn with_word(tag: Tag, at: usize, word: u32) -> String {
    let error = refused(|all| {
        payload(all, tag, 0)[at * 4..at * 4 + 4].copy_from_slice(&word.to_le_bytes());
    });
    reason(error)
}

/// The reason why a section makes no sense.
fn reason(error: StateError) -> String {
    let text = error.to_string();
    assert!(matches!(error, StateError::Section { .. }), "{text}");
    text
}

/// Why a state with another description is refused.
fn with_meta(change: impl FnOnce(&mut Value)) -> StateError {
    refused(|all| {
        let meta = payload(all, META, 0);
        let mut value: Value = serde_json::from_slice(meta).unwrap();
        change(&mut value);
        *meta = serde_json::to_vec(&value).unwrap();
    })
}

/// A state with another header, whose checksum is right.
fn with_header(at: usize, value: &[u8]) -> Vec<u8> {
    let mut bytes = state();
    bytes[at..at + value.len()].copy_from_slice(value);
    let checksum = xxh64(&bytes[..24], 0);
    bytes[24..32].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

#[test]
fn something_else_is_no_state() {
    let others = [
        &b""[..],
        b"GGUF",
        b"x",
        b"\x89PNG\r\n\x1a\n",
        b"\x89KVSTATS",
    ];
    for bytes in others {
        let error = SavedState::parse(bytes).unwrap_err();
        assert!(matches!(error, StateError::NotAState), "{error}");
    }
}

#[test]
fn a_state_that_is_cut_off_or_goes_on_is_refused_with_both_lengths() {
    let bytes = state();
    let n = bytes.len() as u64;
    let cut = SavedState::parse(&bytes[..bytes.len() - 1]).unwrap_err();
    assert!(
        matches!(cut, StateError::Truncated { wanted, got } if (wanted, got) == (n, n - 1)),
        "{cut}"
    );
    let longer = SavedState::parse(&[&bytes[..], b"x"].concat()).unwrap_err();
    assert!(
        matches!(longer, StateError::Trailing { end, got } if (end, got) == (n, n + 1)),
        "{longer}"
    );
    // A header with fewer or more sections than there are.
    let n_sections = sections(&bytes).len() as u32;
    let fewer = with_header(12, &(n_sections - 1).to_le_bytes());
    let fewer = SavedState::parse(&fewer).unwrap_err();
    assert!(
        matches!(fewer, StateError::Trailing { end, got } if end < n && got == n),
        "{fewer}"
    );
    let more = with_header(12, &(n_sections + 1).to_le_bytes());
    let more = SavedState::parse(&more).unwrap_err();
    assert!(
        matches!(more, StateError::Truncated { wanted, got } if wanted > n && got == n),
        "{more}"
    );
}

#[test]
fn a_header_with_another_length_is_refused() {
    let n = state().len() as u64;
    let more = SavedState::parse(&with_header(16, &(n + 5).to_le_bytes())).unwrap_err();
    assert!(
        matches!(more, StateError::Truncated { wanted, got } if (wanted, got) == (n + 5, n)),
        "{more}"
    );
    let fewer = SavedState::parse(&with_header(16, &(n - 5).to_le_bytes())).unwrap_err();
    assert!(
        matches!(fewer, StateError::Trailing { end, got } if (end, got) == (n - 5, n)),
        "{fewer}"
    );
}

#[test]
fn a_section_that_is_longer_than_the_state_is_refused() {
    let n = state().len() as u64;
    for (len, wanted) in [
        (n, 32 + 24 + 8 + n),
        (u64::MAX - 8, 32 + 24 + 8 + u64::MAX / 2),
        (u64::MAX, 32 + 24 + 8 + u64::MAX / 2),
    ] {
        let mut bytes = state();
        bytes[40..48].copy_from_slice(&len.to_le_bytes());
        let checksum = xxh64(&bytes[32..48], 0);
        bytes[48..56].copy_from_slice(&checksum.to_le_bytes());
        let error = SavedState::parse(&bytes).unwrap_err();
        assert!(
            matches!(error, StateError::Truncated { wanted: w, got } if (w, got) == (wanted, n)),
            "{error}"
        );
    }
}

#[test]
fn version_0_is_refused_too() {
    let error = SavedState::parse(&with_header(8, &[0])).unwrap_err();
    assert!(
        matches!(error, StateError::Version { found: 0, known: 1 }),
        "{error}"
    );
}

#[test]
fn damage_is_found_by_its_place() {
    let damaged = |at: usize| {
        let mut bytes = state();
        bytes[at] ^= 1;
        match SavedState::parse(&bytes).unwrap_err() {
            StateError::Checksum { what, at, .. } => (what, at),
            other => (other.to_string(), 0),
        }
    };
    assert_eq!(damaged(13), ("the header".to_owned(), 0));
    assert_eq!(damaged(32 + 9), ("the header of section 0".to_owned(), 32));
    assert_eq!(damaged(32 + 24), ("section 0 'META'".to_owned(), 56));
}

#[test]
fn sections_that_are_there_once_are_there_once() {
    for tag in [META, TOKENS, STATES] {
        let twice = refused(|all| {
            let copy = all[position(all, tag)].clone();
            all.push(copy);
        });
        assert!(
            matches!(
                twice,
                StateError::SectionCount {
                    n: 2,
                    wanted: 1,
                    ..
                }
            ),
            "{twice}"
        );
    }
    for tag in [META, TOKENS] {
        let missing = refused(|all| {
            all.remove(position(all, tag));
        });
        assert!(
            matches!(
                missing,
                StateError::SectionCount {
                    n: 0,
                    wanted: 1,
                    ..
                }
            ),
            "{missing}"
        );
    }
    let rows = refused(|all| {
        all.remove(position(all, ROWS));
    });
    assert!(
        matches!(
            rows,
            StateError::SectionCount {
                n: 5,
                wanted: 6,
                ..
            }
        ),
        "{rows}"
    );
}

#[test]
fn descriptions_that_make_no_sense_are_refused() {
    let text = reason(refused(|all| payload(all, META, 0).truncate(5)));
    assert!(
        text.starts_with("section 'META' makes no sense: EOF"),
        "{text}"
    );
    let beyond = with_meta(|meta| meta["empty"] = json!([[0, 4096]]));
    assert_eq!(
        reason(beyond),
        "section 'META' makes no sense: sequence 4096 is beyond 4095"
    );
}

/// Words of a part: its number, kind and width of its window, cells, sets, tokens of images; then
/// the set of both sequences, positions, and the set of each cell.
#[test]
fn parts_that_make_no_sense_are_refused() {
    let with_word = |at, word| with_word(PART, at, word);
    let says = |text: String, what: &str| {
        let wanted = format!("section 'PART' makes no sense: {what}");
        assert!(text.starts_with(&wanted), "{text}");
    };
    says(with_word(1, 9), "there is no window of kind 9");
    says(with_word(8, 0), "a set of 2 sequences with 1 ids");
    says(with_word(9 + 9, 5), "there is no set 5 of 1");
    says(
        with_word(3, 1 << 30),
        "1073741824 numbers at byte 36 are beyond its",
    );
    let longer = refused(|all| payload(all, PART, 0).extend([0; 4]));
    says(reason(longer), "4 of its");
    let shorter = refused(|all| {
        let bytes = payload(all, PART, 0);
        bytes.truncate(bytes.len() - 4);
    });
    says(reason(shorter), "1 numbers at byte");
    for (grids, what) in [
        (
            [[9, 0, 0], [0, 0, 0]],
            "row 9 of 9 lies in an image, after row 0",
        ),
        (
            [[3, 0, 0], [3, 0, 0]],
            "row 3 of 9 lies in an image, after row 4",
        ),
    ] {
        let image = refused(|all| {
            let bytes = payload(all, PART, 0);
            bytes[20..24].copy_from_slice(&2u32.to_le_bytes());
            let words = grids.iter().flatten();
            let grids: Vec<u8> = words.flat_map(|word: &u32| word.to_le_bytes()).collect();
            bytes.splice((9 + 9 + 9) * 4..(9 + 9 + 9) * 4, grids);
        });
        says(reason(image), what);
    }
}

#[test]
fn states_that_are_not_there_are_refused() {
    // Rows, histories; then the sequence, its first position, its states; then a state's row.
    let text = with_word(STATES, 5, 7);
    assert_eq!(
        text,
        "section 'STAT' makes no sense: there is no state 7 of 2"
    );
    let text = with_word(STATES, 5, 2);
    assert!(text.ends_with("there is no state 2 of 2"), "{text}");
    let longer = refused(|all| payload(all, STATES, 0).extend([0; 4]));
    let text = reason(longer);
    assert!(text.contains("are too many"), "{text}");
    // Rows of states where there are none.
    let rows = refused(|all| {
        all.remove(position(all, STATES));
        for (number, len) in [(4, 4), (5, 8)] {
            payload(all, ROWS, number).truncate(len);
        }
        let meta = payload(all, META, 0);
        let mut value: Value = serde_json::from_slice(meta).unwrap();
        for number in [4, 5] {
            value["rows"][number]["n_rows"] = json!(1);
        }
        *meta = serde_json::to_vec(&value).unwrap();
    });
    let text = reason(rows);
    assert!(
        text.ends_with("1 rows of layer 2 that no token has"),
        "{text}"
    );
}

#[test]
fn rows_that_no_token_has_are_refused() {
    let fewer = with_meta(|meta| meta["rows"][0]["n_rows"] = json!(8));
    assert_eq!(
        reason(fewer),
        "section 'ROWS' makes no sense: 8 rows of layer 0 that no token has"
    );
    // Of a part that there is not.
    let other = with_meta(|meta| meta["rows"][0]["stored"]["heads"]["part"] = json!(7));
    assert_eq!(
        reason(other),
        "section 'ROWS' makes no sense: 9 rows of layer 0 that no token has"
    );
    // Floats are no keys.
    let floats = with_meta(|meta| meta["rows"][0]["stored"] = json!({ "floats": 1 }));
    assert_eq!(
        reason(floats),
        "section 'ROWS' makes no sense: 9 rows of layer 0 that no token has"
    );
}

#[test]
fn rows_that_take_other_bytes_are_refused() {
    let error = refused(|all| {
        payload(all, ROWS, 0).pop();
    });
    assert_eq!(
        reason(error),
        "section 'ROWS' makes no sense: 9 rows of layer 0 do not take 17 bytes"
    );
}

#[test]
fn states_of_impossible_types_are_refused() {
    let stored = |at: usize, stored: Value| {
        reason(with_meta(move |meta| {
            meta["rows"]
                .as_array_mut()
                .unwrap()
                .iter_mut()
                .filter(|row| row["layer"] == 2)
                .nth(at)
                .unwrap()["stored"] = stored;
        }))
    };
    let values = |len: u64, kv_type: &str| json!({ "values": { "len": len, "kv_type": kv_type } });
    // Two values as f16 take other bytes than two floats.
    let text = stored(1, values(2, "f16"));
    assert!(text.contains("do not take"), "{text}");
    // Blocks that two values are no whole number of, and more values than can be counted.
    for impossible in [values(2, "q8_0"), values(u64::MAX / 2, "f16")] {
        let text = stored(1, impossible);
        assert!(text.contains("do not take"), "{text}");
    }
    // Inputs of convolutions are floats, and keys are no states.
    let text = stored(0, values(1, "f32"));
    assert!(text.contains("that no token has"), "{text}");
    let key = with_meta(|meta| meta["rows"][0]["stored"] = values(1, "f16"));
    assert!(reason(key).contains("that no token has"));
    let unknown = with_meta(|meta| meta["rows"][0]["stored"] = values(1, "f8"));
    assert!(unknown.to_string().contains("f8"), "{unknown}");
}

#[test]
fn rows_that_are_there_twice_are_refused() {
    let error = refused(|all| {
        let keys = payload(all, ROWS, 0).clone();
        *payload(all, ROWS, 1) = keys;
        let meta = payload(all, META, 0);
        let mut value: Value = serde_json::from_slice(meta).unwrap();
        value["rows"][1] = value["rows"][0].clone();
        *meta = serde_json::to_vec(&value).unwrap();
    });
    assert_eq!(
        reason(error),
        "section 'ROWS' makes no sense: rows of layer 0 are there twice"
    );
}

#[test]
fn what_no_memory_could_hold_is_refused() {
    // The position of the first token becomes that of the second; the last one goes back.
    let error = refused(|all| {
        let bytes = payload(all, PART, 0);
        bytes[(9 + 8) * 4..(9 + 9) * 4].copy_from_slice(&2u32.to_le_bytes());
    });
    let StateError::Snapshot(SnapshotError::Ends { seq, .. }) = error else {
        panic!("{error}");
    };
    assert_eq!(seq, SeqId(0));
}

#[test]
fn tokens_outside_the_vocabulary_are_refused() {
    // Token 3 is evaluated, token 4 comes next.
    for (n_vocab, wanted) in [(4, 4), (3, 3)] {
        let error = with_meta(|meta| meta["fingerprint"]["n_vocab"] = json!(n_vocab));
        assert_eq!(
            error.to_string(),
            format!(
                "the state has token {wanted} in sequence 1, but the model's are below {n_vocab}"
            )
        );
    }
}

#[test]
fn lists_of_tokens_that_make_no_sense_are_refused() {
    // How many lists; then a sequence, its evaluated and its pending tokens, and these.
    let twice = refused(|all| {
        let bytes = payload(all, TOKENS, 0);
        bytes[0] = 2;
        bytes.extend_from_within(4..);
    });
    let wanted = "section 'TOKN' makes no sense: sequence 1 is there twice, or cannot be";
    assert_eq!(reason(twice), wanted);
    let text = with_word(TOKENS, 1, 4096);
    assert!(text.contains("sequence 4096 is there twice"), "{text}");
    let longer = reason(refused(|all| payload(all, TOKENS, 0).extend([0; 4])));
    assert!(longer.contains("are too many"), "{longer}");
}

fn saved(tokens: &[SeqTokens], out: &mut dyn std::io::Write) -> Result<u64, StateError> {
    let (memory, layout) = memory();
    let state = StateToSave {
        fingerprint: &fingerprint(),
        snapshot: &memory.snapshot(Seqs::All).unwrap(),
        tokens,
        layout: &layout,
        kv_type: None,
        state_type: None,
        note: "",
    };
    save(&state, &mut |_, _| Ok(()), out)
}

#[test]
fn tokens_outside_the_vocabulary_are_not_saved() {
    for (evaluated, pending) in [(vec![TokenId(10)], vec![]), (vec![], vec![TokenId(10)])] {
        let seq = SeqId(0);
        let tokens = [SeqTokens {
            seq,
            evaluated,
            pending,
        }];
        let mut bytes = Vec::new();
        let error = saved(&tokens, &mut bytes).unwrap_err();
        assert!(
            matches!(
                error,
                StateError::Token {
                    token: TokenId(10),
                    n_vocab: 10,
                    ..
                }
            ),
            "{error}"
        );
        assert!(bytes.is_empty());
    }
}

#[test]
fn a_state_that_cannot_be_written_or_read_off_the_device_says_why() {
    let error = saved(&[], &mut &mut [0u8; 40][..]).unwrap_err();
    assert!(matches!(error, StateError::Write(_)), "{error}");
    let bytes = state();
    let parsed = SavedState::parse(&bytes).unwrap();
    let (_, layout) = memory();
    let state = StateToSave {
        fingerprint: &fingerprint(),
        snapshot: parsed.snapshot(),
        tokens: &[],
        layout: &layout,
        kv_type: None,
        state_type: None,
        note: "",
    };
    let layer = LayerIdx(0);
    let mut read = |_, _: &mut [u8]| Err(BackendError::NoRows { layer });
    let error = save(&state, &mut read, &mut Vec::new()).unwrap_err();
    assert!(
        matches!(error, StateError::Backend(BackendError::NoRows { .. })),
        "{error}"
    );
}

#[test]
fn rows_of_other_layers_or_shapes_are_refused() {
    let bytes = state();
    let state = SavedState::parse(&bytes).unwrap();
    let refused = |layout: &RowLayout| match state.check_rows(layout).unwrap_err() {
        StateError::Rows {
            layer, kind, here, ..
        } => (layer.0, kind, here),
        other => panic!("{other}"),
    };
    let (_, layout) = memory();
    state.check_rows(&layout).unwrap();
    let other = |change: &dyn Fn(&mut Vec<LayerMemory>)| {
        let (mut changed, cells) = (layers().iter().map(|l| l.1).collect(), [12, 12]);
        change(&mut changed);
        let changed = LayerMap::new(changed);
        let layout = RowLayout::new(&changed, &cells[..changed.parts().len()], KvType::F16);
        refused(&layout.unwrap().with_states(&changed, 4).unwrap())
    };
    let attention = |kv_heads, k_dim, window| {
        LayerMemory::Attention(AttentionMemory {
            kv_heads,
            k_dim,
            v_dim: 2,
            window,
        })
    };
    // More heads, wider keys, keys of another part, wider states.
    let full = Window::Full;
    let heads = other(&|all| all[0] = attention(2, 1, full));
    assert_eq!(heads.2, "2 heads of 1 values in f16");
    let wide = other(&|all| all[0] = attention(1, 2, full));
    assert_eq!(wide.2, "1 heads of 2 values in f16");
    let part = other(&|all| all[1] = attention(1, 1, full));
    assert_eq!((part.0, part.1), (1, RowKind::K));
    let states = other(&|all| {
        all[2] = LayerMemory::Recurrent(RecurrentMemory {
            conv_row: 1,
            state_row: 3,
        });
    });
    assert_eq!(
        (states.0, states.1, &states.2[..]),
        (2, RowKind::State, "3 floats")
    );
    // A memory without the recurrent layer.
    let attention = RowLayout::new(&layers(), &[12, 12], KvType::F16).unwrap();
    let (layer, kind, here) = refused(&attention);
    assert_eq!((layer, kind, here.as_str()), (2, RowKind::Conv, "nothing"));
    let (layer, kind, here) = refused(&RowLayout::default());
    assert_eq!((layer, kind, here.as_str()), (0, RowKind::K, "nothing"));
}
