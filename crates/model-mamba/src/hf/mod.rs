//! [`classes`]: how directories of Mamba models and hybrids are translated. Data over the tables
//! that [`model_core::hf`] shares.

mod griffin;
mod hybrid;
mod hybrid_tensors;
mod kimi;
mod lfm2;
mod mamba;
mod minimax;
mod mixer_tensors;
mod nemotron;
mod qwen;
mod qwen_rows;
mod rwkv;
mod rwkv6;
mod rwkv7;
mod xlstm;
mod zamba;

use model_core::hf::{HfClass, HfConfig, Keys, ModelFileError};

/// All classes.
pub(crate) fn classes() -> impl Iterator<Item = HfClass> {
    let tables = mamba::CLASSES.iter();
    let tables = tables.chain(hybrid::CLASSES).chain(qwen::CLASSES);
    let tables = tables.chain(lfm2::CLASSES);
    let tables = tables.chain(nemotron::CLASSES);
    tables.copied().chain([
        kimi::CLASS,
        griffin::CLASS,
        minimax::CLASS,
        zamba::CLASS,
        xlstm::CLASS,
        rwkv::CLASS,
        rwkv6::CLASS,
        rwkv7::CLASS,
    ])
}

fn as_u32(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// Time steps that are cut to a range are not computed; files that say so say a range without end.
fn free_time_steps(config: &HfConfig, _: &mut Keys) -> Result<(), ModelFileError> {
    let key = "time_step_limit";
    match config.optional_numbers(key)?.as_deref() {
        None => Ok(()),
        Some([low, high]) if *low <= 0.0 && *high == f64::INFINITY => Ok(()),
        Some(_) => Err(config.wrong(key, "from 0 to Infinity")),
    }
}
