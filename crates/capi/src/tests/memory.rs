//! Edits of sequences, and their states.

use super::scene::{LoadedModel, MAMBA, Scene, Text};
use crate::context::{Context, llama_free};
use crate::ffi::{Handle, In, Out};
use crate::memory::{
    llama_memory_can_shift, llama_memory_clear, llama_memory_seq_add, llama_memory_seq_cp,
    llama_memory_seq_div, llama_memory_seq_keep, llama_memory_seq_pos_max,
    llama_memory_seq_pos_min, llama_memory_seq_rm,
};
use crate::state::{
    llama_state_get_data, llama_state_get_size, llama_state_seq_get_data, llama_state_seq_get_size,
    llama_state_seq_load_file, llama_state_seq_save_file, llama_state_seq_set_data,
    llama_state_set_data,
};

fn several() -> Scene {
    Scene::new(|p| (p.n_seq_max, p.kv_unified) = (3, true))
}

fn positions(context: Handle<Context>, seq: i32) -> (i32, i32) {
    let (first, last) = (
        llama_memory_seq_pos_min(context, seq),
        llama_memory_seq_pos_max(context, seq),
    );
    (first, last)
}

#[test]
fn tokens_are_removed_by_position() {
    let scene = several();
    let context = scene.context;
    assert_eq!(scene.decode(0, 0, &[5, 6, 7, 8]), 0);
    assert_eq!(scene.decode(1, 0, &[5, 6]), 0);
    assert!(llama_memory_seq_rm(context, 0, 2, -1));
    assert_eq!(positions(context, 0), (0, 1));
    assert!(llama_memory_seq_rm(context, 0, 1, 1), "nothing is removed");
    assert_eq!(positions(context, 0), (0, 1));
    assert!(llama_memory_seq_rm(context, -1, -1, 1), "of all sequences");
    assert_eq!([positions(context, 0), positions(context, 1)], [(1, 1); 2]);
    llama_memory_clear(context, false);
    assert_eq!(
        [positions(context, 0), positions(context, 1)],
        [(-1, -1); 2]
    );
}

#[test]
fn a_copy_goes_on_as_the_original() {
    let scene = several();
    let context = scene.context;
    assert_eq!(scene.decode(0, 0, &[5, 6, 7, 8]), 0);
    llama_memory_seq_cp(context, 0, 1, -1, -1);
    assert_eq!(positions(context, 1), (0, 3));
    assert_eq!(scene.decode(0, 4, &[9]), 0);
    let wanted = scene.logits(-1).unwrap();
    assert_eq!(scene.decode(1, 4, &[9]), 0);
    assert_eq!(scene.logits(-1).unwrap(), wanted);
    llama_memory_seq_keep(context, 1);
    assert_eq!(
        [positions(context, 0), positions(context, 1)],
        [(-1, -1), (0, 4)]
    );
}

#[test]
fn a_copy_keeps_what_it_does_not_replace() {
    let scene = several();
    let context = scene.context;
    assert_eq!(scene.decode(0, 0, &[5, 6, 7, 8]), 0);
    assert_eq!(scene.decode(1, 0, &[15, 16]), 0);
    llama_memory_seq_cp(context, 0, 1, 2, -1);
    assert_eq!(positions(context, 1), (0, 3));
    assert_eq!(scene.decode(1, 4, &[9, 10]), 0);
    // There is nothing from 4 on, and one token at 2 and 3 each.
    llama_memory_seq_cp(context, 0, 1, 4, -1);
    llama_memory_seq_cp(context, 0, 1, 2, -1);
    assert_eq!(positions(context, 1), (0, 5));
    assert!(llama_memory_seq_rm(context, 1, 2, 4));
    llama_memory_seq_cp(context, 0, 1, -1, -1);
    assert_eq!(positions(context, 1), (0, 5));
}

#[test]
fn a_state_is_of_one_position() {
    let model = LoadedModel::open(MAMBA);
    let context = model.context(|p| (p.n_seq_max, p.kv_unified) = (2, true));
    let scene = Scene { model, context };
    assert_eq!(scene.decode(0, 0, &[5, 6, 7]), 0);
    assert_eq!(positions(context, 0), (2, 2));
    assert!(!llama_memory_seq_rm(context, 0, 1, -1), "it cannot be cut");
    llama_memory_seq_cp(context, 0, 1, -1, -1);
    assert_eq!(positions(context, 1), (2, 2));
}

#[test]
fn positions_are_moved_and_divided() {
    let scene = several();
    let context = scene.context;
    assert!(llama_memory_can_shift(context));
    assert_eq!(scene.decode(0, 0, &[5, 6, 7, 8, 9, 10]), 0);
    assert!(llama_memory_seq_rm(context, 0, 1, 3));
    llama_memory_seq_add(context, 0, 3, -1, -2);
    assert_eq!(positions(context, 0), (0, 3));
    llama_memory_seq_add(context, 0, 0, -1, -2);
    assert_eq!(positions(context, 0), (0, 1), "what gets before 0 is lost");
    llama_memory_seq_add(context, 0, 0, -1, 4);
    assert_eq!(positions(context, 0), (4, 5));
    llama_memory_seq_div(context, 0, 0, -1, 2);
    assert_eq!(positions(context, 0), (2, 2));
    llama_memory_seq_div(context, 0, 0, -1, 0);
    assert_eq!(positions(context, 0), (2, 2), "a refusal");
}

fn state_of(context: Handle<Context>, seq: i32) -> Vec<u8> {
    let size = llama_state_seq_get_size(context, seq);
    let mut bytes = vec![0; size];
    let n = llama_state_seq_get_data(context, Out::of(bytes.as_mut_ptr()), size, seq);
    assert_eq!(n, size);
    bytes
}

#[test]
fn another_context_takes_a_state() {
    let scene = several();
    assert_eq!(scene.decode(1, 0, &[5, 6, 7]), 0);
    let bytes = state_of(scene.context, 1);
    assert_eq!(scene.decode(1, 3, &[9]), 0);
    let wanted = scene.logits(-1).unwrap();

    let other = Scene::new(|p| p.n_ctx = 256);
    let input = In::of(bytes.as_ptr());
    assert_eq!(
        llama_state_seq_set_data(other.context, input, bytes.len(), 0),
        bytes.len()
    );
    assert_eq!(positions(other.context, 0), (0, 2));
    assert_eq!(other.decode(0, 3, &[9]), 0);
    assert_eq!(other.logits(-1).unwrap(), wanted);

    // What is cut short or changed is refused, and changes nothing.
    let cut = bytes.len() - 1;
    assert_eq!(llama_state_seq_set_data(other.context, input, cut, 0), 0);
    assert_eq!(
        llama_state_set_data(other.context, input, bytes.len()),
        0,
        "of one sequence"
    );
    let mut changed = bytes.clone();
    changed[40] ^= 1;
    let input = In::of(changed.as_ptr());
    assert_eq!(
        llama_state_seq_set_data(other.context, input, changed.len(), 0),
        0
    );
    assert_eq!(positions(other.context, 0), (0, 3));
}

#[test]
fn a_whole_state_has_all_sequences() {
    let scene = several();
    assert_eq!(scene.decode(0, 0, &[5]), 0);
    assert_eq!(scene.decode(2, 0, &[6, 7]), 0);
    let size = llama_state_get_size(scene.context);
    let mut bytes = vec![0; size];
    let out = Out::of(bytes.as_mut_ptr());
    assert_eq!(
        llama_state_get_data(scene.context, out, size - 1),
        0,
        "too little room"
    );
    assert_eq!(llama_state_get_data(scene.context, out, size), size);
    llama_memory_clear(scene.context, true);
    assert_eq!(
        llama_state_set_data(scene.context, In::of(bytes.as_ptr()), size),
        size
    );
    assert_eq!(positions(scene.context, 0), (0, 0));
    assert_eq!(positions(scene.context, 2), (0, 1));
}

#[test]
fn files_hold_states_and_tokens() {
    let scene = several();
    assert_eq!(scene.decode(0, 0, &[5, 6]), 0);
    let folder = tempfile::tempdir().unwrap();
    let path = Text::new(folder.path().join("state").to_str().unwrap());
    let tokens = [5, 6];
    let input = In::of(tokens.as_ptr());
    let n_bytes = llama_state_seq_save_file(scene.context, path.get(), 0, input, 2);
    assert!(n_bytes > 0);
    let (mut room, mut n) = ([0; 4], 0);
    let mut load = |out: *mut i32, size| {
        let n = Out::of(&raw mut n);
        llama_state_seq_load_file(scene.context, path.get(), 1, Out::of(out), size, n)
    };
    assert_eq!(load(room.as_mut_ptr(), 1), 0, "too little room");
    assert!(
        load(std::ptr::null_mut(), 0) > 0,
        "the number of tokens alone"
    );
    assert_eq!(positions(scene.context, 1), (-1, -1));
    assert_eq!(load(room.as_mut_ptr(), 4), n_bytes);
    assert_eq!((room, n), ([5, 6, 0, 0], 2));
    assert_eq!(positions(scene.context, 1), (0, 1));
}

#[test]
fn sequences_of_their_own_hold_as_much_each() {
    let model = LoadedModel::new();
    let context = model.context(|p| (p.n_ctx, p.n_seq_max) = (512, 2));
    let scene = Scene { model, context };
    assert_eq!(scene.decode(0, 0, &[5; 256]), 0);
    assert_eq!(scene.decode(0, 256, &[5]), 1, "256 of 512 are the other's");
    assert_eq!(scene.decode(1, 0, &[5; 256]), 0);
    llama_free(Handle::NULL);
}
