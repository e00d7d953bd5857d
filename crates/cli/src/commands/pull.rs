//! `cellar pull`: downloads a model. The path goes to stdout, all else to stderr.

use std::io::Write;

use cellar_hub::{Event, Hub, HubConfig, ModelName, PulledModel, VariantSize};

use crate::args::PullArgs;
use crate::failure::{Exit, words};
use crate::interrupt;
use crate::machine::bytes;
use crate::progress::Progress;
use crate::terminal;

pub(super) fn run(args: &PullArgs, out: &mut impl Write) -> anyhow::Result<Exit> {
    let name = &args.name;
    interrupt::exit_on_interrupt_saying(format!("stopped; 'cellar pull {name}' continues"))?;
    let pulled = download(name)?;
    if pulled.n_downloaded > 0 {
        note(&format!(
            "verified; 'cellar run -m {}' runs it",
            pulled.name
        ));
    }
    writeln!(out, "{}", pulled.path.display())?;
    out.flush()?;
    Ok(Exit::Done)
}

/// Downloads a model, with its size, its progress and what else there is to choose on stderr.
///
/// # Errors
/// As [`Hub::pull`].
pub(super) fn download(name: &ModelName) -> anyhow::Result<PulledModel> {
    let hub = Hub::new(HubConfig::from_env()?);
    let mut bar = None;
    let pulled = hub.pull(name, &mut |event| match event {
        Event::Chosen {
            variant,
            others,
            n_files,
            n_bytes,
            n_present,
        } => {
            let files = if n_files == 1 { "file" } else { "files" };
            let size = bytes(n_bytes);
            let there = match n_present {
                0 => String::new(),
                n if n == n_bytes => ", all in the cache".to_owned(),
                n => format!(", {} of them in the cache", bytes(n)),
            };
            let label = &variant.label;
            note(&format!(
                "{}: {label}, {size} in {n_files} {files}{there}",
                name.repo
            ));
            if name.quant.is_none() && !others.is_empty() {
                note(&format!(
                    "others to choose with {}:QUANT: {}",
                    name.repo,
                    list(others)
                ));
            }
            if n_present < n_bytes {
                bar = Some(Progress::bytes(label.clone(), n_bytes, n_present));
            }
        }
        Event::Progress { n_bytes } => {
            if let Some(bar) = &bar {
                bar.set_bytes(n_bytes);
            }
        }
        Event::Waiting { file } => note(&format!("another process downloads {file}; waiting")),
        Event::Retrying { file, reason } => note(&format!("{file}: {reason}; trying again")),
        _ => {}
    })?;
    drop(bar);
    Ok(pulled)
}

fn list(variants: &[VariantSize]) -> String {
    let text = variants.iter().map(ToString::to_string);
    text.collect::<Vec<_>>().join(", ")
}

/// Prints a line on stderr, above the progress bar.
fn note(text: &str) {
    Progress::suspend(|| terminal::note(words(text)));
}
