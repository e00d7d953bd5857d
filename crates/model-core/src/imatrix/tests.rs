//! Both forms of importance matrices read as what was written, and damaged ones are refused.

use std::collections::BTreeMap;

use super::*;
use crate::gguf::{GgufFile, GgufWriter};

fn dense() -> Importance {
    Importance {
        sums: vec![2.0, 4.0, 0.0],
        counts: vec![4.0],
    }
}

fn matrix() -> ImportanceMatrix {
    let experts = Importance {
        sums: vec![1.0, 2.0, 0.0, 0.0],
        counts: vec![2.0, 0.0],
    };
    ImportanceMatrix {
        entries: BTreeMap::from([
            ("blk.0.attn_q.weight".to_owned(), dense()),
            ("blk.0.ffn_up_exps.weight".to_owned(), experts),
        ]),
        datasets: vec!["notes.txt".to_owned()],
        n_chunks: 3,
        chunk_size: Some(512),
    }
}

/// The older form of two entries, as its table says.
fn legacy() -> Vec<u8> {
    let mut bytes = 2i32.to_le_bytes().to_vec();
    for (name, n_calls, values) in [("a.weight", 4i32, [2f32, 4.0, 0.0]), ("b", 2, [1.0; 3])] {
        bytes.extend((name.len() as i32).to_le_bytes());
        bytes.extend(name.as_bytes());
        bytes.extend(n_calls.to_le_bytes());
        bytes.extend(3i32.to_le_bytes());
        bytes.extend(values.iter().flat_map(|v| v.to_le_bytes()));
    }
    bytes
}

#[test]
fn the_gguf_form_comes_back() {
    let bytes = matrix().to_bytes().unwrap();
    assert_eq!(ImportanceMatrix::parse(bytes.clone()), Ok(matrix()));
    // What other programs look for.
    let file = GgufFile::from_bytes(bytes.into()).unwrap();
    let metadata = file.metadata();
    assert_eq!(metadata.get::<&str>("general.type"), Ok("imatrix"));
    assert_eq!(metadata.get::<u32>("imatrix.chunk_count"), Ok(3));
    assert_eq!(metadata.get::<u32>("imatrix.chunk_size"), Ok(512));
    let shape = |name: &str| file.tensor(name).unwrap().shape().to_vec();
    assert_eq!(shape("blk.0.attn_q.weight.in_sum2"), [3]);
    assert_eq!(shape("blk.0.attn_q.weight.counts"), [1]);
    assert_eq!(shape("blk.0.ffn_up_exps.weight.in_sum2"), [2, 2]);
    assert_eq!(shape("blk.0.ffn_up_exps.weight.counts"), [2, 1]);
}

#[test]
fn the_older_form_is_read_with_its_end_and_without() {
    let mut bytes = legacy();
    let without = ImportanceMatrix::parse(bytes.clone()).unwrap();
    assert_eq!(without.entries["a.weight"], dense());
    assert_eq!((without.n_chunks, without.datasets.len()), (0, 0));
    let at = 4 + 4 + "a.weight".len();
    let mut no_calls = bytes.clone();
    no_calls[at..at + 4].fill(0);
    let means =
        ImportanceMatrix::parse(no_calls).unwrap().entries["a.weight"].mean_squares(&[8, 3]);
    assert_eq!(means, Some(vec![2.0, 4.0, 0.0]));
    bytes.extend(7i32.to_le_bytes());
    bytes.extend(4i32.to_le_bytes());
    bytes.extend(b"text");
    let with = ImportanceMatrix::parse(bytes.clone()).unwrap();
    assert_eq!((with.n_chunks, &*with.datasets[0]), (7, "text"));
    assert_eq!(with.entries, without.entries);
    // Whichever form it was read from, it is written in the newer one.
    let again = ImportanceMatrix::parse(with.to_bytes().unwrap());
    assert_eq!(again, Ok(with));
    // Every truncation but the one before the end is refused.
    for n in (1..bytes.len()).filter(|&n| n != legacy().len()) {
        let refused = ImportanceMatrix::parse(bytes[..n].to_vec()).unwrap_err();
        assert!(refused.contains("truncated"), "{n}: {refused}");
    }
    bytes.push(0);
    let refused = ImportanceMatrix::parse(bytes).unwrap_err();
    assert_eq!(refused, "no importance matrix: 1 bytes follow its end");
}

#[test]
fn means_are_those_of_the_weights_matrices() {
    let means = |name: &str, shape: &[usize]| matrix().entries[name].mean_squares(shape);
    let dense = |shape: &[usize]| means("blk.0.attn_q.weight", shape);
    assert_eq!(dense(&[8, 3]), Some(vec![0.5, 1.0, 0.0]));
    let others: [&[usize]; 4] = [&[3, 8], &[2, 8, 3], &[8, 6], &[]];
    assert!(others.iter().all(|shape| dense(shape).is_none()));
    // The second expert saw no input.
    let experts = means("blk.0.ffn_up_exps.weight", &[2, 8, 2]);
    assert_eq!(experts, Some(vec![0.5, 1.0, 1.0, 1.0]));
    assert_eq!(means("blk.0.ffn_up_exps.weight", &[8, 4]), None);
    // The older form has one number for all experts.
    let older = Importance {
        counts: vec![2.0],
        ..matrix().entries["blk.0.ffn_up_exps.weight"].clone()
    };
    let wanted = Some(vec![0.5, 1.0, 0.0, 0.0]);
    assert_eq!(older.mean_squares(&[2, 8, 2]), wanted);
}

#[test]
fn what_is_no_importance_matrix_is_refused() {
    let refused = |bytes: Vec<u8>, reason: &str| {
        let error = ImportanceMatrix::parse(bytes).unwrap_err();
        assert!(error.contains(reason), "{error}");
    };
    let with = |edit: &dyn Fn(&mut ImportanceMatrix)| {
        let mut matrix = matrix();
        edit(&mut matrix);
        matrix.to_bytes().unwrap()
    };
    let model = GgufWriter::new().set("general.type", "model").to_bytes();
    refused(model.unwrap(), "general.type is 'model', not 'imatrix'");
    let untyped = GgufWriter::new().to_bytes();
    refused(untyped.unwrap(), "general.type is missing");
    refused(with(&|m| m.entries.clear()), "without entries");
    refused(0i32.to_le_bytes().to_vec(), "without entries");
    refused(
        (-1i32).to_le_bytes().to_vec(),
        "-1 at byte 0 is no number of entries",
    );
    refused(
        b"{\"a\": 1}".to_vec(),
        "no importance matrix, or a truncated one",
    );
    for bad in [f32::NAN, -1.0, f32::INFINITY] {
        let bytes = with(&|m| {
            let entry = m.entries.get_mut("blk.0.attn_q.weight");
            entry.unwrap().sums[1] = bad;
        });
        refused(bytes, &format!("'blk.0.attn_q.weight': {bad} is no sum"));
    }
    let mut no_counts = GgufWriter::new();
    no_counts.set("general.type", "imatrix");
    let file = GgufFile::from_bytes(matrix().to_bytes().unwrap().into()).unwrap();
    let sums = file.weight("blk.0.attn_q.weight.in_sum2").unwrap();
    no_counts.add(sums).unwrap();
    refused(no_counts.to_bytes().unwrap(), "blk.0.attn_q.weight.counts");
    let mut no_sums = GgufWriter::new();
    no_sums.set("general.type", "imatrix");
    let counts = file.weight("blk.0.attn_q.weight.counts").unwrap();
    no_sums.add(counts).unwrap();
    refused(no_sums.to_bytes().unwrap(), "has counts, but no sums");
}
