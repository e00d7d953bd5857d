//! Decoding and encoding of blocks against values of an independent implementation
//! (`data/make_block_golden.py` says which, and describes the file).
#![allow(clippy::unwrap_used)] // a test

use std::path::Path;

use kv_core::block::{BlockFormat, dequantize, quantize};

/// Reads the golden file front to back.
struct Cursor(Vec<u8>, usize);

impl Cursor {
    fn open() -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/block_golden.bin");
        Self(std::fs::read(path).unwrap(), 0)
    }

    fn take(&mut self, n: usize) -> &[u8] {
        self.1 += n;
        &self.0[self.1 - n..self.1]
    }

    fn count(&mut self) -> usize {
        u32::from_le_bytes(self.take(4).try_into().unwrap()) as usize
    }

    fn values(&mut self, n: usize) -> Vec<f32> {
        self.take(4 * n)
            .as_chunks()
            .0
            .iter()
            .map(|b| f32::from_le_bytes(*b))
            .collect()
    }

    fn format(&mut self) -> BlockFormat {
        let n = usize::from(self.take(1)[0]);
        let name = String::from_utf8(self.take(n).to_vec()).unwrap();
        BlockFormat::ALL
            .into_iter()
            .find(|f| f.name() == name)
            .unwrap()
    }
}

#[test]
fn blocks_decode_and_encode_as_elsewhere() {
    let mut golden = Cursor::open();
    let mut decoded = Vec::new();
    for _ in 0..golden.count() {
        let format = golden.format();
        let n_blocks = golden.count();
        let bytes = golden.take(n_blocks * format.block_bytes()).to_vec();
        let wanted = golden.values(n_blocks * format.block_len());
        let mut got = vec![f32::NAN; wanted.len()];
        dequantize(format, &bytes, &mut got);
        for (i, (got, wanted)) in got.iter().zip(&wanted).enumerate() {
            assert_eq!(
                got.to_bits(),
                wanted.to_bits(),
                "{format}[{i}]: {got}, not {wanted}"
            );
        }
        decoded.push(format);
    }
    assert_eq!(decoded, BlockFormat::ALL);

    let n_values = golden.count();
    let values = golden.values(n_values);
    for _ in 0..golden.count() {
        let format = golden.format();
        let n_bytes = golden.count();
        let wanted = golden.take(n_bytes).to_vec();
        let got = quantize(format, &values).unwrap();
        let differing = got.iter().zip(&wanted).filter(|(a, b)| a != b).count();
        assert_eq!(
            (got.len(), differing),
            (wanted.len(), 0),
            "{format}: (length, bytes differing)"
        );
    }
    assert_eq!(golden.1, golden.0.len(), "all of the file was read");
}
