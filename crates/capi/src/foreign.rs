//! State files that llama.cpp itself wrote (sessions of version 11, sequences of version 4).
//!
//! A file is read whole, its rows become a state in Cellar's own format, and that is restored like
//! any other: Cellar's keys and values lie as llama.cpp's do. Invariant: a file that is not
//! understood to its last byte changes nothing. Reads models whose layers all attend over the
//! whole text, with keys and values in F32, F16 or BF16; others are refused by name. Writes none.

use cellar_engine::Engine;
use cellar_engine::with_reasons;
use kv_backend::state::{SavedState, StateToSave, save};
use kv_backend::{BoxedBackend, RowKind};
use kv_core::{
    CellIdx, PartIdx, Pos, PosRange, SeqId, SeqSet, Window,
    cells::Cell,
    memory::{CellRecord, Edit, PartSnapshot, RestoreInto, Seqs, Snapshot},
};
use kv_rows::{KvType, KvTypes, RowLayout};

use crate::abi::ggml_type;
use crate::context::Context;
use crate::meta::{IMROPE, MROPE, has_states, rope_type};

/// The first bytes of a file with a whole context, as they lie in the file, and its version.
const SESSION: ([u8; 4], u32) = (*b"nsgg", 11);
/// Those of a file with one sequence.
const SEQUENCE: ([u8; 4], u32) = (*b"qsgg", 4);
/// Bytes before the tokens: those, the version, the number of tokens.
pub(crate) const HEAD_BYTES: usize = 12;

/// True if llama.cpp wrote the file.
///
/// # Errors
/// A version that is not read, for people.
pub(crate) fn is_foreign(bytes: &[u8]) -> Result<bool, String> {
    let Some((magic, rest)) = bytes.split_first_chunk::<4>() else {
        return Ok(false);
    };
    let Some((_, known)) = [SESSION, SEQUENCE].into_iter().find(|(m, _)| m == magic) else {
        return Ok(false);
    };
    let version = rest
        .first_chunk::<4>()
        .map(|bytes| u32::from_le_bytes(*bytes));
    if version == Some(known) {
        Ok(true)
    } else {
        Err(format!(
            "it is a state of llama.cpp of version {}: {known} is read",
            version.unwrap_or_default()
        ))
    }
}

/// Takes numbers and bytes from the front.
struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    fn bytes(&mut self, n: usize) -> Result<&'a [u8], String> {
        let n_left = self.rest.len();
        let (taken, rest) = self
            .rest
            .split_at_checked(n)
            .ok_or_else(|| format!("it is cut short: {n} bytes are wanted, and {n_left} left"))?;
        self.rest = rest;
        Ok(taken)
    }

    fn number(&mut self) -> Result<u32, String> {
        let bytes = self.bytes(4)?.first_chunk::<4>();
        Ok(bytes.map_or(0, |bytes| u32::from_le_bytes(*bytes)))
    }

    fn long(&mut self) -> Result<u64, String> {
        let bytes = self.bytes(8)?.first_chunk::<8>();
        Ok(bytes.map_or(0, |bytes| u64::from_le_bytes(*bytes)))
    }

    /// A number of things, each of at least `least` bytes that are still to come.
    fn count(&mut self, least: usize) -> Result<usize, String> {
        let n = self.number()? as usize;
        if n > self.rest.len() / least {
            let n_left = self.rest.len();
            return Err(format!(
                "it names {n} things, and {n_left} bytes are left for them"
            ));
        }
        Ok(n)
    }
}

/// The rows of one kind of one layer.
#[derive(Default)]
struct Rows {
    kv_type: Option<KvType>,
    bytes: Vec<u8>,
}

impl Rows {
    /// Says of which type rows are.
    fn check_type(&mut self, number: u32) -> Result<KvType, String> {
        let kv_type = i32::try_from(number).ok().and_then(ggml_type::kv_type);
        let read = kv_type.filter(|kv_type| !kv_type.is_quantised());
        let read = read.ok_or_else(|| {
            format!("its rows are of ggml type {number}: F32, F16 and BF16 are read")
        })?;
        if self.kv_type.is_some_and(|known| known != read) {
            return Err("its streams have rows of different types".to_owned());
        }
        self.kv_type = Some(read);
        Ok(read)
    }

    fn check_bytes(named: u64, wanted: usize) -> Result<(), String> {
        if named == wanted as u64 {
            return Ok(());
        }
        Err(format!(
            "its rows have {named} bytes, and those of the model {wanted}"
        ))
    }
}

/// The contents of a file.
struct Contents {
    cells: Vec<Cell>,
    /// Keys and values of each layer.
    rows: Vec<[Rows; 2]>,
}

impl Contents {
    fn read(fields: &mut Fields<'_>, widths: &[[usize; 2]]) -> Result<Self, String> {
        let mut contents = Self {
            cells: Vec::new(),
            rows: widths.iter().map(|_| Default::default()).collect(),
        };
        for _ in 0..fields.count(4)? {
            let n_cells = fields.count(8)?;
            if n_cells > 0 {
                contents.read_cells(fields, n_cells)?;
                contents.read_rows(fields, n_cells, widths)?;
            }
        }
        if fields.rest.is_empty() {
            Ok(contents)
        } else {
            Err(format!(
                "{} bytes are left: it is of another model, or one with windows or states",
                fields.rest.len()
            ))
        }
    }

    fn read_cells(&mut self, fields: &mut Fields<'_>, n_cells: usize) -> Result<(), String> {
        for _ in 0..n_cells {
            let pos = Pos(fields.number()?);
            let mut seqs = SeqSet::EMPTY;
            for _ in 0..fields.count(4)? {
                let seq = fields.number()?;
                if !seqs.insert(SeqId(seq)) {
                    return Err(format!("it names sequence {seq}, which cannot be"));
                }
            }
            self.cells.push(Cell {
                pos,
                seqs,
                grid: None,
            });
        }
        Ok(())
    }

    fn read_rows(
        &mut self,
        fields: &mut Fields<'_>,
        n_cells: usize,
        widths: &[[usize; 2]],
    ) -> Result<(), String> {
        let is_transposed = fields.number()? != 0;
        let n_layers = fields.number()? as usize;
        if n_layers != widths.len() {
            return Err(format!(
                "it has rows of {n_layers} layers, and the model of {}",
                widths.len()
            ));
        }
        if [fields.number()?, fields.number()?] != [0, 0] {
            return Err(
                "its rows are rotated before they are stored, which is not read".to_owned(),
            );
        }
        for ([keys, _], [width, _]) in self.rows.iter_mut().zip(widths) {
            let kv_type = keys.check_type(fields.number()?)?;
            let row_bytes = kv_type.row_bytes(*width);
            Rows::check_bytes(fields.long()?, row_bytes)?;
            keys.bytes
                .extend_from_slice(fields.bytes(n_cells * row_bytes)?);
        }
        for ([_, values], [_, width]) in self.rows.iter_mut().zip(widths) {
            let kv_type = values.check_type(fields.number()?)?;
            let row_bytes = kv_type.row_bytes(*width);
            if is_transposed {
                let n_bytes = kv_type.row_bytes(1);
                Rows::check_bytes(fields.number()?.into(), n_bytes)?;
                Rows::check_bytes(fields.number()?.into(), *width)?;
                let columns = fields.bytes(n_cells * row_bytes)?;
                for cell in 0..n_cells {
                    for column in columns.chunks_exact(n_cells * n_bytes) {
                        values
                            .bytes
                            .extend_from_slice(&column[cell * n_bytes..][..n_bytes]);
                    }
                }
            } else {
                Rows::check_bytes(fields.long()?, row_bytes)?;
                values
                    .bytes
                    .extend_from_slice(fields.bytes(n_cells * row_bytes)?);
            }
        }
        Ok(())
    }

    /// The same as a state in Cellar's format.
    fn to_state(&self, engine: &Engine<BoxedBackend>) -> Result<Vec<u8>, String> {
        let of = |kind: usize| self.rows.first().and_then(|rows| rows[kind].kv_type);
        let (Some(k), Some(v)) = (of(0), of(1)) else {
            return Err("it has no rows".to_owned());
        };
        let map = engine.model().layers();
        let layout = RowLayout::new(map, &[self.cells.len()], KvTypes::new(k, v));
        let layout = layout.map_err(|error| with_reasons(&error))?;
        let records = (0u32..).zip(&self.cells).map(|(row, cell)| CellRecord {
            row: CellIdx(row),
            cell: cell.clone(),
        });
        let part = PartSnapshot {
            part: PartIdx(0),
            window: Window::Full,
            cells: records.collect(),
            forgotten: Vec::new(),
        };
        let snapshot = Snapshot::new(vec![part], None).map_err(|error| with_reasons(&error))?;
        let layers: Vec<_> = layout.layers().iter().map(|rows| rows.layer).collect();
        let mut read = |span: kv_backend::RowSpan, out: &mut [u8]| {
            let number = layers.iter().position(|layer| *layer == span.layer);
            let kind = usize::from(span.kind == RowKind::V);
            let rows = number.and_then(|number| self.rows.get(number));
            let row_bytes = out.len() / (span.len as usize).max(1);
            let start = span.first.as_usize() * row_bytes;
            let bytes = rows.and_then(|rows| rows[kind].bytes.get(start..start + out.len()));
            let missing = kv_backend::BackendError::NoRows { layer: span.layer };
            out.copy_from_slice(bytes.ok_or(missing)?);
            Ok(())
        };
        let mut bytes = Vec::new();
        let state = StateToSave {
            fingerprint: engine.fingerprint(),
            snapshot: &snapshot,
            tokens: &[],
            layout: &layout,
            kv_type: None,
            state_type: None,
            note: "",
        };
        save(&state, &mut read, &mut bytes).map_err(|error| with_reasons(&error))?;
        Ok(bytes)
    }
}

/// Values of a row of keys and of values, of each layer, if all attend over the whole text.
fn widths(context: &Context, engine: &Engine<BoxedBackend>) -> Result<Vec<[usize; 2]>, String> {
    let map = engine.model().layers();
    let parts = map.parts();
    let is_full = parts.len() == 1 && parts.iter().all(|part| part.window == Window::Full);
    // Tokens of these have a row and a column, which is another format.
    let is_grid = matches!(rope_type(&context.shared), MROPE | IMROPE);
    if !is_full || has_states(&context.shared)[0] || is_grid {
        let name = engine.model().architecture();
        return Err(format!(
            "states of llama.cpp are read for models whose layers all attend over the whole text, \
             not for '{name}'"
        ));
    }
    let layout = RowLayout::new(map, &[1], KvTypes::new(KvType::F32, KvType::F32));
    let layout = layout.map_err(|error| with_reasons(&error))?;
    let layers = layout.layers().iter();
    let own = layers.map(|rows| Some([rows.k.len(), rows.stored_v()?.len()]));
    let own: Option<Vec<_>> = own.collect();
    own.ok_or_else(|| "states of llama.cpp are not read for latent keys and values".to_owned())
}

/// Restores what stands behind the tokens of a file: one sequence, or all.
///
/// # Errors
/// Why not, for people; nothing has changed then.
pub(crate) fn restore(
    context: &Context,
    file: &[u8],
    n_tokens: usize,
    to: Option<i32>,
) -> Result<(), String> {
    let is_session = file.starts_with(&SESSION.0);
    if is_session == to.is_some() {
        let what = if is_session {
            "a whole context"
        } else {
            "one sequence"
        };
        return Err(format!("this is llama.cpp's state of {what}"));
    }
    let mut fields = Fields {
        rest: file.get(HEAD_BYTES + n_tokens * 4..).unwrap_or_default(),
    };
    let mut state = context.lock();
    let engine = &mut state.engine;
    if is_session {
        let n = fields.count(1)?;
        let name = fields.bytes(n)?;
        if name != engine.model().architecture().as_bytes() {
            let name = String::from_utf8_lossy(name);
            let own = engine.model().architecture();
            return Err(format!("it is of a model of kind '{name}', not '{own}'"));
        }
    }
    let contents = Contents::read(&mut fields, &widths(context, engine)?)?;
    let to = to.and_then(|to| u32::try_from(to).ok()).map(SeqId);
    let Some(first) = contents.cells.first() else {
        let edit = to.map_or(Edit::Clear, |seq| Edit::Remove {
            seqs: Seqs::One(seq),
            range: PosRange::ALL,
        });
        return engine
            .edit(edit)
            .map(drop)
            .map_err(|error| with_reasons(&error));
    };
    let into = match (to, first.seqs.iter().next()) {
        (None, _) => RestoreInto::All,
        (Some(to), Some(from)) => RestoreInto::One { from, to },
        (Some(_), None) => return Err("its first token belongs to no sequence".to_owned()),
    };
    let bytes = contents.to_state(engine)?;
    let saved = SavedState::parse(&bytes).map_err(|error| with_reasons(&error))?;
    let restored = engine.restore_state(&saved, into);
    restored.map(drop).map_err(|error| with_reasons(&error))
}
