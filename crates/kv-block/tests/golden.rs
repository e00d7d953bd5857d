//! Decoding and encoding of blocks against values of an independent implementation
//! (`tests/fixtures/kv-block/make_golden.py` says which, and describes the file).
#![allow(clippy::unwrap_used)] // a test

use std::path::Path;

use kv_block::{BlockFormat, dequantize, quantize};

/// Reads the golden file front to back.
struct Cursor(Vec<u8>, usize);

impl Cursor {
    fn open() -> Self {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/kv-block/golden.bin");
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

/// What each type loses on rows like a model's, by the root mean square: `sin(0.013 i² + i)`, the
/// same on a pedestal of 30, and the same with two opposite outliers in each block. The numbers are
/// those of the independent implementation for the same rows.
///
/// Types with a minimum of their own (`q4_1`, `q5_1`) lose nothing on a pedestal, where the others
/// lose almost everything. With opposite outliers it is the other way round: their steps begin at
/// the smallest value, so 0 is none of them, and all small values of a block are off by the same
/// amount.
#[test]
fn what_narrow_types_lose_depends_on_where_their_steps_begin() {
    let base = |i: u32| (f64::from(i).powi(2) * 0.013 + f64::from(i)).sin();
    let outlier = |i: u32| match i % 32 {
        5 => 100.0,
        9 => -60.0,
        _ => 0.0,
    };
    let lost = |value: &dyn Fn(u32) -> f64, format| {
        let values: Vec<f32> = (0..4096).map(|i| value(i) as f32).collect();
        let mut back = vec![f32::NAN; values.len()];
        dequantize(format, &quantize(format, &values).unwrap(), &mut back);
        let off = back.iter().zip(&values).map(|(a, b)| f64::from(a - b));
        (off.map(|off| off * off).sum::<f64>() / values.len() as f64).sqrt()
    };
    for (format, wanted) in [
        (BlockFormat::Q8_0, [0.00225, 0.06491, 0.19641]),
        (BlockFormat::Q5_1, [0.01764, 0.01788, 1.71943]),
        (BlockFormat::Q5_0, [0.02153, 0.46369, 0.7865]),
        (BlockFormat::Q4_1, [0.03613, 0.03628, 3.85878]),
        (BlockFormat::Q4_0, [0.04638, 1.2287, 0.80331]),
    ] {
        let got = [
            lost(&base, format),
            lost(&|i| base(i) + 30.0, format),
            lost(&|i| base(i) + outlier(i), format),
        ];
        for (got, wanted) in got.iter().zip(wanted) {
            assert!(
                (got - wanted).abs() < 1e-3 * wanted + 5e-6,
                "{format}: {got}, not {wanted}"
            );
        }
    }
}
