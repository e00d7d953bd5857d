//! Our encoding of the K formats next to candle's: the error is no larger, with the importance of
//! columns and without.

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use kv_block::{BlockFormat, dequantize, quantize, quantize_weighted};

const COLUMNS: usize = 1024;
const ROWS: usize = 16;

const FORMATS: [(BlockFormat, GgmlDType); 5] = [
    (BlockFormat::Q2_K, GgmlDType::Q2K),
    (BlockFormat::Q3_K, GgmlDType::Q3K),
    (BlockFormat::Q4_K, GgmlDType::Q4K),
    (BlockFormat::Q5_K, GgmlDType::Q5K),
    (BlockFormat::Q6_K, GgmlDType::Q6K),
];

/// Numbers that look random, nearly normal, with an outlier now and then.
fn noise(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    let value = |i: usize| match i % 97 {
        0 => 4.0 * next(),
        _ => next() + next() + next(),
    };
    (0..n).map(value).collect()
}

fn error(format: BlockFormat, bytes: &[u8], values: &[f32], importance: &[f32]) -> f64 {
    let mut read = vec![f32::NAN; values.len()];
    dequantize(format, bytes, &mut read);
    let each = values.iter().zip(&read).zip(importance.iter().cycle());
    each.map(|((a, b), w)| f64::from(w * (a - b) * (a - b)))
        .sum()
}

#[test]
fn k_formats_lose_no_more_than_candles() {
    let values = noise(ROWS * COLUMNS, 1);
    let tensor = Tensor::from_slice(&values, (ROWS, COLUMNS), &Device::Cpu).unwrap();
    for (format, of) in FORMATS {
        let theirs = QTensor::quantize(&tensor, of).unwrap();
        let theirs = error(format, &theirs.data().unwrap(), &values, &[1.0]);
        let ours = error(format, &quantize(format, &values).unwrap(), &values, &[1.0]);
        eprintln!("{format}: {:.3}", ours / theirs);
        assert!(ours <= theirs, "{format}: {ours}, candle {theirs}");
    }
}

#[test]
fn k_formats_with_importance_lose_no_more_than_candles() {
    let values = noise(ROWS * COLUMNS, 3);
    let importance: Vec<f32> = noise(COLUMNS, 7).iter().map(|x| (2.0 * x).exp()).collect();
    let tensor = Tensor::from_slice(&values, (ROWS, COLUMNS), &Device::Cpu).unwrap();
    // Candle has no weighted encoding of Q2_K.
    for (format, of) in FORMATS.into_iter().skip(1) {
        let theirs = QTensor::quantize_imatrix(&tensor, &importance, of).unwrap();
        let theirs = error(format, &theirs.data().unwrap(), &values, &importance);
        let rows = values.chunks_exact(COLUMNS);
        let ours = rows.flat_map(|row| quantize_weighted(format, row, &importance).unwrap());
        let ours: Vec<u8> = ours.collect();
        let ours = error(format, &ours, &values, &importance);
        eprintln!("{format}: {:.3}", ours / theirs);
        assert!(ours <= theirs, "{format}: {ours}, candle {theirs}");
    }
}
