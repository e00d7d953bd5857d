//! `cellar devices`: what can compute here, and why the rest cannot.

use std::io::Write;

use cellar::{BackendKind, ComputeDevice, backend_devices};
use kv_backend::BackendError;
use serde::Serialize;

use crate::args::DevicesArgs;
use crate::failure::{Exit, words};
use crate::machine::bytes;
use crate::terminal;

/// A backend. Sizes are in bytes.
#[derive(Debug, Serialize)]
struct Row {
    backend: &'static str,
    devices: Vec<DeviceRow>,
    /// Why the backend cannot be used.
    #[serde(skip_serializing_if = "Option::is_none")]
    unavailable: Option<String>,
}

/// A device of it.
#[derive(Debug, Serialize)]
struct DeviceRow {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    memory: Option<u64>,
    free: Option<u64>,
    /// Why the device cannot be used.
    #[serde(skip_serializing_if = "Option::is_none")]
    unavailable: Option<String>,
}

impl Row {
    fn new(kind: BackendKind) -> Self {
        let (devices, unavailable) = match backend_devices(kind) {
            Ok(devices) => (devices.into_iter().map(DeviceRow::new).collect(), None),
            Err(error) => (Vec::new(), Some(reason(&error))),
        };
        Self {
            backend: kind.name(),
            devices,
            unavailable,
        }
    }
}

impl DeviceRow {
    fn new(device: Result<ComputeDevice, BackendError>) -> Self {
        match device {
            Ok(device) => Self {
                name: Some(device.description),
                memory: device.memory.map(|memory| memory.total),
                free: device.memory.map(|memory| memory.free),
                unavailable: None,
            },
            Err(error) => Self {
                name: None,
                memory: None,
                free: None,
                unavailable: Some(reason(&error)),
            },
        }
    }
}

/// Why something cannot be used, without the backend's name where the error has it.
fn reason(error: &BackendError) -> String {
    match error {
        BackendError::Unavailable { reason, .. } => reason.clone(),
        other => other.to_string(),
    }
}

pub(super) fn run(args: &DevicesArgs, out: &mut impl Write) -> anyhow::Result<Exit> {
    let is_listed = |kind: &BackendKind| match kind {
        // Few builds have them.
        BackendKind::CandleCuda => cfg!(feature = "candle-cuda"),
        BackendKind::Metal => cfg!(target_os = "macos"),
        BackendKind::OpenCl => !cfg!(target_os = "macos"),
        BackendKind::CandleMetal => cfg!(feature = "candle-metal"),
        _ => true,
    };
    let kinds = BackendKind::ALL.into_iter().filter(is_listed);
    let rows: Vec<Row> = kinds.map(Row::new).collect();
    if args.json {
        writeln!(out, "{}", terminal::json(&rows)?)?;
    } else {
        rows.iter().try_for_each(|row| print(row, out))?;
    }
    out.flush()?;
    Ok(Exit::Done)
}

fn print(row: &Row, out: &mut impl Write) -> std::io::Result<()> {
    let name = row.backend;
    let absent = |reason: &String| format!("not available: {}", words(reason));
    if let Some(reason) = &row.unavailable {
        writeln!(out, "{name:12} {}", absent(reason))?;
    }
    for device in &row.devices {
        let text = match (&device.unavailable, &device.name) {
            (Some(reason), _) => absent(reason),
            (None, name) => words(name.as_deref().unwrap_or_default()),
        };
        let memory = match (device.free, device.memory) {
            (Some(free), Some(total)) => format!(", {} of {} free", bytes(free), bytes(total)),
            _ => String::new(),
        };
        writeln!(out, "{name:12} {text}{memory}")?;
    }
    Ok(())
}
