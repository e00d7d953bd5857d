//! `--context-shift`, `--keep` and self-extend: what happens to texts longer than the context.

use cellar_engine::{GroupAttention, LongContext};
use model_core::tokenizer::{EncodeOptions, Tokenizer};

use crate::args::LongContextArgs;
use crate::failure::{UsageError, usage};

/// Checks the flags before a model is loaded.
///
/// # Errors
/// A usage error where groups cannot be formed.
pub(crate) fn check(args: &LongContextArgs) -> anyhow::Result<()> {
    read(args, 0).map(drop)
}

/// What the flags say of a text in a context of `n_ctx` tokens, which begins with `n_bos` tokens
/// that are kept in addition to those of --keep.
///
/// # Errors
/// A usage error where groups cannot be formed, or --keep leaves nothing to drop.
pub(crate) fn of_text(
    args: &LongContextArgs,
    n_ctx: u32,
    n_bos: u32,
) -> anyhow::Result<LongContext> {
    let long_context = read(args, n_bos)?;
    check_keep(long_context, n_ctx, n_bos)?;
    Ok(long_context)
}

/// The flags for all texts of a service: prompts begin as the tokenizer begins them.
///
/// # Errors
/// As [`of_text`].
pub(crate) fn of_service(
    args: &LongContextArgs,
    n_ctx: u32,
    tokenizer: &Tokenizer,
) -> anyhow::Result<LongContext> {
    let n_begin = tokenizer.encode("", EncodeOptions::PROMPT).len();
    of_text(args, n_ctx, u32::try_from(n_begin).unwrap_or(u32::MAX))
}

/// The flags as the engine takes them; `n_bos` tokens at the beginning are kept in addition to
/// those of --keep.
///
/// # Errors
/// A usage error where groups cannot be formed.
fn read(args: &LongContextArgs, n_bos: u32) -> anyhow::Result<LongContext> {
    match args.group_attention_factor {
        Some(factor) => GroupAttention::new(factor, args.group_attention_width)
            .map(LongContext::Group)
            .map_err(|error| UsageError(error.to_string()).into()),
        None if args.context_shift => Ok(LongContext::Shift {
            n_keep: args.keep.saturating_add(n_bos),
        }),
        None => Ok(LongContext::Stop),
    }
}

/// Checks that --keep leaves tokens to drop: half of the others go, which must be at least one.
///
/// # Errors
/// A usage error with the largest number that works.
fn check_keep(long_context: LongContext, n_ctx: u32, n_bos: u32) -> anyhow::Result<()> {
    let LongContext::Shift { n_keep } = long_context else {
        return Ok(());
    };
    let most = n_ctx.saturating_sub(2);
    if n_keep <= most {
        return Ok(());
    }
    if most <= n_bos && n_keep == n_bos {
        return usage(format!(
            "--context-shift has no tokens to drop in a context of {n_ctx}: choose a larger --ctx"
        ));
    }
    usage(format!(
        "--keep {} leaves no tokens to drop from a context of {n_ctx}: keep at most {}, or choose a \
         larger --ctx",
        n_keep - n_bos,
        most.saturating_sub(n_bos)
    ))
}
