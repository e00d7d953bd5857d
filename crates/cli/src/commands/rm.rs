//! `cellar rm`: removes a model from the cache.

use std::io::Write;

use cellar_hub::{Cache, HubError};

use crate::args::RmArgs;
use crate::failure::Exit;
use crate::machine::bytes;

pub(super) fn run(args: &RmArgs, out: &mut impl Write) -> anyhow::Result<Exit> {
    let removed = match Cache::from_env()?.remove(&args.name) {
        Ok(removed) => removed,
        Err(HubError::NotCached { name, cache }) => anyhow::bail!(
            "no model '{name}' in {}; 'cellar list' shows what there is",
            cache.display()
        ),
        Err(error) => return Err(error.into()),
    };
    writeln!(
        out,
        "removed {}: {} freed",
        args.name,
        bytes(removed.n_bytes)
    )?;
    out.flush()?;
    Ok(Exit::Done)
}
