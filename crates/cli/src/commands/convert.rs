//! `cellar convert`: writes a model as a GGUF file, in a format of choice ([`cellar::convert`]).

use std::io::Write;

use cellar::architectures;
use cellar::convert::{ColumnWeights, Conversion};

use crate::args::{AdapterArgs, ConvertArgs, OutputType};
use crate::failure::{Exit, warn};
use crate::input;
use crate::interrupt::exit_on_interrupt;
use crate::machine;
use crate::models::ModelSource;
use crate::output_file;
use crate::progress::Progress;
use crate::terminal;

pub(super) fn run(args: &ConvertArgs, out: &mut impl Write) -> anyhow::Result<Exit> {
    output_file::check("OUT", &args.out)?;
    let weighting = match &args.imatrix {
        Some(path) => Some(ColumnWeights::from_bytes(path, input::bytes(path)?)?),
        None => None,
    };
    exit_on_interrupt()?;
    let model = ModelSource::File(args.model.clone()).open()?;
    let adapters = AdapterArgs {
        lora: args.lora.clone(),
        ..AdapterArgs::default()
    };
    let model = match adapters.options().open(&model, &architectures())? {
        Some(adapters) => model.merged_with(adapters),
        None => model,
    };
    let conversion = match args.output_type {
        OutputType::AsStored => Conversion::as_stored(&model, weighting.as_ref())?,
        OutputType::Of(file_type) => Conversion::new(&model, file_type, weighting.as_ref())?,
    };
    conversion.notes().iter().for_each(|note| warn(note));
    let progress = Progress::values("converting", conversion.n_values());
    let n_bytes = output_file::write(&args.out, |file| {
        let written = conversion.write(file, |n_done| progress.set(n_done));
        written.map_err(|error| match error {
            cellar::Error::Io(error) => error.into(),
            error => anyhow::Error::from(error),
        })
    })?;
    drop(progress);
    let line = format!(
        "{}: {} tensors, {}",
        args.out.display(),
        conversion.tensors().len(),
        machine::bytes(n_bytes)
    );
    let line = terminal::escape(&line);
    if output_file::is_stdout(&args.out) {
        terminal::note(line);
    } else {
        writeln!(out, "{line}")?;
        out.flush()?;
    }
    Ok(Exit::Done)
}
