//! What configs with latent attention (DeepSeek-V2, arXiv 2405.04434) have in common: the parts of
//! heads, and which rows of the matrix `kv_b_proj` make keys and values.

use super::{HeadRows, HfConfig, ModelFileError};

/// Values of a head's key: those that the latent makes, and those that all heads share.
///
/// # Errors
/// [`ModelFileError`] naming the key.
pub fn latent_head_dims(config: &HfConfig) -> Result<[usize; 2], ModelFileError> {
    Ok([
        config.count("qk_nope_head_dim")?,
        config.count("qk_rope_head_dim")?,
    ])
}

/// Rows of each head that make keys of latents.
///
/// # Errors
/// [`ModelFileError`] naming the key.
pub fn latent_key_rows(config: &HfConfig) -> Result<HeadRows, ModelFileError> {
    let [plain, _] = latent_head_dims(config)?;
    Ok(HeadRows {
        n_heads: config.count("num_attention_heads")?,
        n_rows: plain + config.count("v_head_dim")?,
        rows: 0..plain,
    })
}

/// Rows of each head that make values of latents.
///
/// # Errors
/// [`ModelFileError`] naming the key.
pub fn latent_value_rows(config: &HfConfig) -> Result<HeadRows, ModelFileError> {
    let of_keys = latent_key_rows(config)?;
    Ok(HeadRows {
        rows: of_keys.rows.end..of_keys.n_rows,
        ..of_keys
    })
}
