//! Files as llama.cpp writes them, made here from the rows of a context.

use kv_backend::{RowKind, RowSpan};
use kv_core::{CellIdx, LayerIdx};

use super::scene::{LoadedModel, Scene, Text};
use crate::context::Context;
use crate::ffi::{Handle, Out};
use crate::memory::{llama_memory_seq_pos_max, llama_memory_seq_pos_min, llama_memory_seq_rm};
use crate::state::{llama_state_load_file, llama_state_seq_load_file};

/// ggml's number of F32, in which the contexts of these tests have their rows.
const F32: i32 = 0;

fn f32_context(model: &LoadedModel) -> Handle<Context> {
    let context = model.context(|p| {
        (p.n_seq_max, p.kv_unified, p.flash_attn_type) = (3, true, 0);
        (p.type_k, p.type_v) = (F32, F32);
    });
    assert!(!context.is_null());
    context
}

/// A file of llama.cpp's, piece by piece.
struct File {
    bytes: Vec<u8>,
}

impl File {
    fn new(magic: &[u8; 4], version: u32, tokens: &[u32]) -> Self {
        let mut file = Self {
            bytes: magic.to_vec(),
        };
        file.words(&[version, tokens.len() as u32]);
        file.words(tokens);
        file
    }

    fn words(&mut self, words: &[u32]) {
        let bytes = words.iter().flat_map(|word| word.to_le_bytes());
        self.bytes.extend(bytes);
    }

    /// The rows of a context's cells, of tokens at `positions` of a sequence.
    fn memory(&mut self, context: Handle<Context>, seq: u32, positions: &[u32], order: Order) {
        let n = positions.len() as u32;
        // One stream.
        self.words(&[1, n]);
        for &pos in positions {
            self.words(&[pos, 1, seq]);
        }
        let state = context.get().unwrap().lock();
        let n_layers = state.engine.model().layers().n_layers() as u32;
        self.words(&[u32::from(order == Order::ByColumn), n_layers, 0, 0]);
        for kind in [RowKind::K, RowKind::V] {
            for layer in 0..n_layers {
                let values = state.engine.model().layers().attention(LayerIdx(layer));
                let attention = values.unwrap();
                let width = (attention.kv_heads * attention.k_dim) as u32;
                let mut rows = vec![0; (n * width * 4) as usize];
                let span = RowSpan {
                    layer: LayerIdx(layer),
                    kind,
                    first: CellIdx(0),
                    len: n,
                };
                state.engine.read_rows(span, &mut rows).unwrap();
                if kind == RowKind::V && order == Order::ByColumn {
                    self.words(&[F32 as u32, 4, width]);
                    let (cells, _) = rows.as_chunks::<4>();
                    for column in 0..width {
                        let values = cells.iter().skip(column as usize).step_by(width as usize);
                        self.bytes.extend(values.flatten());
                    }
                } else {
                    self.words(&[F32 as u32, width * 4, 0]);
                    self.bytes.extend(rows);
                }
            }
        }
    }
}

/// The layout of values in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    ByRow,
    ByColumn,
}

/// A context whose first cells hold three tokens of a sequence, and the logits of the token after.
fn told(model: &LoadedModel) -> (Scene, Vec<f32>) {
    let scene = Scene {
        context: f32_context(model),
        model: LoadedModel::new(),
    };
    assert_eq!(scene.decode(1, 0, &[5, 6, 7]), 0);
    assert_eq!(scene.decode(1, 3, &[9]), 0);
    let wanted = scene.logits(-1).unwrap();
    assert!(llama_memory_seq_rm(scene.context, 1, 3, -1));
    (scene, wanted)
}

/// Loads bytes as a sequence's file, and its tokens.
fn load(context: Handle<Context>, bytes: &[u8], seq: i32) -> (usize, Vec<i32>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state");
    std::fs::write(&path, bytes).unwrap();
    let path = Text::new(path.to_str().unwrap());
    let (mut room, mut n) = ([0; 4], 0);
    let out = Out::of(room.as_mut_ptr());
    let n_bytes = llama_state_seq_load_file(context, path.get(), seq, out, 4, Out::of(&raw mut n));
    (n_bytes, room[..n].to_vec())
}

#[test]
fn a_sequence_of_llama_cpp_goes_on() {
    let model = LoadedModel::new();
    let (scene, wanted) = told(&model);
    for order in [Order::ByRow, Order::ByColumn] {
        let mut file = File::new(b"qsgg", 4, &[5, 6, 7]);
        file.memory(scene.context, 1, &[0, 1, 2], order);
        let other = Scene {
            context: f32_context(&model),
            model: LoadedModel::new(),
        };
        assert_eq!(other.decode(2, 0, &[8; 9]), 0);
        let loaded = load(other.context, &file.bytes, 2);
        assert_eq!(loaded, (file.bytes.len(), vec![5, 6, 7]), "{order:?}");
        assert_eq!(llama_memory_seq_pos_max(other.context, 2), 2);
        assert_eq!(other.decode(2, 3, &[9]), 0);
        assert_eq!(other.logits(-1).unwrap(), wanted, "{order:?}");
    }
}

#[test]
fn a_session_of_llama_cpp_goes_on() {
    let model = LoadedModel::new();
    let (scene, wanted) = told(&model);
    let mut file = File::new(b"nsgg", 11, &[]);
    file.words(&[5]);
    file.bytes.extend(b"llama");
    file.memory(scene.context, 1, &[0, 1, 2], Order::ByRow);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("session");
    std::fs::write(&path, &file.bytes).unwrap();
    let path = Text::new(path.to_str().unwrap());
    assert_eq!(scene.decode(0, 0, &[8]), 0);
    let mut n = 7;
    let (none, count) = (Out::of(std::ptr::null_mut()), Out::of(&raw mut n));
    assert!(llama_state_load_file(
        scene.context,
        path.get(),
        none,
        0,
        count
    ));
    assert_eq!(n, 0);
    assert_eq!(llama_memory_seq_pos_min(scene.context, 0), -1, "it is gone");
    assert_eq!(scene.decode(1, 3, &[9]), 0);
    assert_eq!(scene.logits(-1).unwrap(), wanted);
}

#[test]
fn what_is_not_understood_changes_nothing() {
    let model = LoadedModel::new();
    let (scene, _) = told(&model);
    let mut whole = File::new(b"qsgg", 4, &[5]);
    whole.memory(scene.context, 1, &[0, 1, 2], Order::ByRow);
    let whole = whole.bytes;
    // Where the numbers lie: a head of 12, a token, streams, cells, 3 cells of 12, and so on.
    let rows = 12 + 4 + 8 + 36;
    let changes: [(&str, usize, u32); 8] = [
        ("the version", 4, 3),
        ("tokens", 8, u32::MAX),
        ("streams", 16, 2),
        ("cells", 20, u32::MAX),
        ("sequences of a cell", 28, u32::MAX),
        ("layers", rows + 4, 1),
        ("the rotation", rows + 8, 64),
        ("the type", rows + 16, 8),
    ];
    for (what, at, value) in changes {
        let mut changed = whole.clone();
        changed[at..at + 4].copy_from_slice(&value.to_le_bytes());
        assert_eq!(load(scene.context, &changed, 1).0, 0, "{what}");
    }
    for n in (0..whole.len()).step_by(whole.len() / 99) {
        assert_eq!(load(scene.context, &whole[..n], 1).0, 0, "{n} bytes");
    }
    let longer = [&whole[..], &[0]].concat();
    assert_eq!(load(scene.context, &longer, 1).0, 0, "a byte more");
    assert_eq!(llama_memory_seq_pos_max(scene.context, 1), 2);
}
