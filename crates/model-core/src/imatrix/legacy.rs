//! The older form, `.dat`: little-endian `i32` numbers and texts.
//!
//! | what | bytes |
//! | --- | --- |
//! | number of entries | 4 |
//! | for each: length of the name, name | 4, length |
//! | number `n` to divide by, number of values | 4, 4 |
//! | values `f32`: `n` times the mean squares, `[matrices, in]` | 4 each |
//! | at the end, in files of later versions: chunks; length of the text's name, name | 4, 4, length |

use super::{Importance, ImportanceMatrix};

/// Bytes that are yet to be read.
struct Reader<'a> {
    rest: &'a [u8],
    n_bytes: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize, what: &str) -> Result<&'a [u8], String> {
        let Some((taken, rest)) = self.rest.split_at_checked(n) else {
            return Err(format!(
                "no importance matrix, or a truncated one: {n} bytes wanted at byte {} for {what}, \
                 {} available",
                self.n_bytes - self.rest.len(),
                self.rest.len(),
            ));
        };
        self.rest = rest;
        Ok(taken)
    }

    /// A number that is at least 0.
    fn count(&mut self, what: &str) -> Result<usize, String> {
        let at = self.n_bytes - self.rest.len();
        let bytes = self.take(4, what)?.try_into().unwrap_or_default();
        let found = i32::from_le_bytes(bytes);
        usize::try_from(found)
            .map_err(|_| format!("no importance matrix: {found} at byte {at} is no {what}"))
    }

    fn text(&mut self, what: &str) -> Result<String, String> {
        let n = self.count(&format!("length of {what}"))?;
        let bytes = self.take(n, what)?.to_vec();
        String::from_utf8(bytes).map_err(|_| format!("no importance matrix: {what} is not UTF-8"))
    }
}

pub(super) fn read(bytes: &[u8]) -> Result<ImportanceMatrix, String> {
    let n_bytes = bytes.len();
    let mut reader = Reader {
        rest: bytes,
        n_bytes,
    };
    let mut matrix = ImportanceMatrix::default();
    for number in 1..=reader.count("number of entries")? {
        let name = reader.text(&format!("the name of entry {number}"))?;
        let n_calls = reader.count(&format!("number of calls of '{name}'"))?;
        let n_values = reader.count(&format!("number of values of '{name}'"))?;
        let values = reader.take(n_values.saturating_mul(4), &format!("'{name}'"))?;
        let values = values.as_chunks::<4>().0.iter().copied();
        let entry = Importance {
            sums: values.map(f32::from_le_bytes).collect(),
            // Of no calls, the values are the mean squares.
            counts: vec![n_calls.max(1) as f32],
        };
        if matrix.entries.insert(name.clone(), entry).is_some() {
            return Err(format!("'{name}' is there twice"));
        }
    }
    if !reader.rest.is_empty() {
        matrix.n_chunks = u32::try_from(reader.count("number of chunks")?).unwrap_or(0);
        matrix.datasets = vec![reader.text("the name of the text")?];
    }
    match reader.rest.len() {
        0 => Ok(matrix),
        n => Err(format!("no importance matrix: {n} bytes follow its end")),
    }
}
