//! A plan as text: the memory layer by layer, then what is on a device, and what in memory.
//! Computes nothing.

use std::io::Write;

use cellar_engine::{LayerReport, MemoryReport, PartReport};
use kv_core::memory::Streams;
use kv_rows::{MemoryPlan, PlannedKind};

use super::Report;
use super::experts::ExpertReport;
use crate::{machine, terminal};
use cellar::{DeviceReport, LayersOnGpu};

/// Prints the report of a plan.
pub(super) fn print(
    report: &Report,
    plan: &MemoryPlan,
    out: &mut impl Write,
) -> std::io::Result<()> {
    print_memory(&report.plan, plan, out)?;
    if let Some(device) = &report.device {
        print_device(device, out)?;
    }
    let memory = match report.device {
        Some(_) => "bookkeeping",
        None => "with bookkeeping",
    };
    let lines = [
        (memory, Some(report.memory)),
        ("weights", Some(report.weights)),
        ("  packed", report.backend.map(|b| b.packed)),
        ("  experts in it", report.experts.as_ref().map(|e| e.held)),
        ("  from the file", Some(report.mapped)),
        ("  looked up", Some(report.looked_up).filter(|&n| n > 0)),
        ("scratch", report.backend.map(|b| b.scratch)),
        ("draft model", report.draft.as_ref().map(|draft| draft.host)),
        ("swap", report.swap.map(|swap| swap.memory)),
        ("this process", report.process),
        ("total", Some(report.total)),
    ];
    writeln!(out)?;
    if report.device.is_none() {
        writeln!(
            out,
            "  {:18} {:>12}",
            "rows",
            machine::bytes(report.plan.n_bytes)
        )?;
    }
    for (name, n) in lines {
        if n.is_none() && ["  experts in it", "  looked up", "draft model", "swap"].contains(&name)
        {
            continue;
        }
        let n = n.map_or_else(|| "not known".to_owned(), machine::bytes);
        writeln!(out, "  {name:18} {n:>12}")?;
    }
    if report.looked_up > 0 {
        writeln!(
            out,
            "  rows that are looked up come as tokens need them, in addition to the total"
        )?;
    }
    if let Some(experts) = &report.experts {
        print_experts(experts, out)?;
    }
    if let Some(n) = report.n_cpu_moe {
        writeln!(out, "  run it with --n-cpu-moe {n}")?;
    }
    if let Some(draft) = report.draft.as_ref().filter(|draft| draft.device > 0) {
        let device = machine::bytes(draft.device);
        writeln!(
            out,
            "  the draft model takes {device} on the GPU in addition"
        )?;
    }
    if let Some(swap) = report.swap.filter(|swap| swap.disk > 0) {
        let disk = machine::bytes(swap.disk);
        writeln!(out, "  swap takes {disk} of the disk in addition")?;
    }
    if let Some(error) = &report.backend_error {
        writeln!(out, "  the backend cannot compute this model: {error}")?;
    }
    let Some(available) = report.available.filter(|_| report.device.is_none()) else {
        return Ok(());
    };
    let advice = match report.largest_n_ctx {
        Some(_) if plan.rows().is_empty() => "room for any context".to_owned(),
        Some(n_ctx) => format!("room for a context of {n_ctx}"),
        None => "no room for any context".to_owned(),
    };
    let available = machine::bytes(available);
    writeln!(out, "  {:18} {available:>12}: {advice}", "free here")
}

/// Which experts stay, and what a token has read.
fn print_experts(experts: &ExpertReport, out: &mut impl Write) -> std::io::Result<()> {
    let ExpertReport {
        total,
        held,
        of_token,
        read_by_token,
        ..
    } = *experts;
    let [all, stay, used, read] = [total, held, of_token, read_by_token].map(machine::bytes);
    let percent = 100.0 * held as f64 / total.max(1) as f64;
    writeln!(
        out,
        "  of {all} of experts {stay} stay ({percent:.0} %); a token goes through {used}, and has \
         {read} of it read where routers have no favourites, less where they have"
    )?;
    if let Some(memory) = experts.expert_memory {
        // Rounded down, so that it fits.
        let memory = match memory >> 20 {
            0 => memory.to_string(),
            mebibytes => format!("{mebibytes}M"),
        };
        writeln!(out, "  run it with --expert-memory {memory}")?;
    }
    Ok(())
}

/// The memory: its parts, then layer by layer.
fn print_memory(
    report: &MemoryReport,
    plan: &MemoryPlan,
    out: &mut impl Write,
) -> std::io::Result<()> {
    let shared = match (report.n_seqs, report.streams) {
        (1, _) => "1 sequence".to_owned(),
        (n, Streams::Shared) => format!("{n} sequences that share cells"),
        (n, Streams::PerSequence) => format!("each of {n} sequences"),
    };
    let MemoryReport {
        architecture,
        n_ctx,
        ..
    } = report;
    let architecture = terminal::escape(architecture);
    writeln!(out, "{architecture}: {n_ctx} tokens of {shared}")?;
    for part in &report.parts {
        let PartReport {
            part,
            window,
            n_cells,
            n_layers,
            n_bytes,
        } = part;
        writeln!(
            out,
            "  part {part}: window {window}, {n_layers} layers, {n_cells} cells, {}",
            machine::bytes(*n_bytes)
        )?;
    }
    if let (Some(first), Some(last)) = (report.recent.first(), report.recent.last()) {
        let (from, to) = (first.layer, last.layer);
        writeln!(
            out,
            "  layers {from} to {to} are not the model's: they have the recent rows of {} to {}",
            first.of, last.of
        )?;
    }
    match plan.rows() {
        [] => writeln!(out, "  an encoder: it remembers nothing"),
        _ => print_layers(&report.layers, plan, out),
    }
}

/// What is on a device, and what stays on the host after it.
fn print_device(device: &DeviceReport, out: &mut impl Write) -> std::io::Result<()> {
    let name = device.name.as_deref().unwrap_or("a GPU (none here)");
    let place = if device.unified {
        ", in the total below"
    } else {
        ""
    };
    let layers = match device.layers {
        Some(LayersOnGpu { last, of }) => format!(", the last {last} of {of} layers"),
        None => String::new(),
    };
    let experts = match device.host_experts {
        Some(1) => ", without the experts of 1 layer".to_owned(),
        Some(n) => format!(", without the experts of {n} layers"),
        None => String::new(),
    };
    let name = terminal::escape(name);
    writeln!(out, "\n  on {name}{layers}{experts}{place}")?;
    let lines = [
        ("rows", device.rows),
        ("weights", device.weights),
        ("scratch", device.scratch),
        ("transfers", device.transfers),
        ("total", device.total),
    ];
    for (name, n) in lines {
        writeln!(out, "  {name:18} {:>12}", machine::bytes(n))?;
    }
    if let Some(room) = device.room {
        let advice = match device.largest_n_ctx {
            Some(n_ctx) => format!("room for a context of {n_ctx}"),
            None => "no room for any context".to_owned(),
        };
        let room = machine::bytes(room);
        writeln!(out, "  {:18} {room:>12}: {advice}", "free there")?;
    }
    writeln!(out, "\n  in memory")
}

/// One line a layer, one column for each kind that occurs, and what the layer remembers.
fn print_layers(
    layers: &[LayerReport],
    plan: &MemoryPlan,
    out: &mut impl Write,
) -> std::io::Result<()> {
    let kinds: Vec<PlannedKind> = PlannedKind::ALL
        .into_iter()
        .filter(|&kind| plan.bytes_of_kind(kind) > 0)
        .collect();
    write!(out, "\n  layer  part")?;
    for kind in &kinds {
        write!(out, "  {kind:>18}")?;
    }
    writeln!(out, "  {:>12}  remembers", "sum")?;
    for LayerReport { layer, remembers } in layers {
        let of_layer = || plan.rows().iter().filter(|rows| rows.layer == *layer);
        let part = of_layer().find_map(|rows| rows.part);
        let part = part.map_or_else(|| "-".to_owned(), |part| part.to_string());
        write!(out, "  {:5}  {part:>4}", layer.0)?;
        for &kind in &kinds {
            let cell = of_layer().find(|rows| rows.kind == kind);
            let text = cell.map_or_else(String::new, |rows| {
                format!("{} {}", rows.kv_type, machine::bytes(rows.bytes()))
            });
            write!(out, "  {text:>18}")?;
        }
        let sum = machine::bytes(plan.bytes_of_layer(*layer));
        writeln!(out, "  {sum:>12}  {remembers}")?;
    }
    write!(out, "    all      ")?;
    for &kind in &kinds {
        write!(out, "  {:>18}", machine::bytes(plan.bytes_of_kind(kind)))?;
    }
    writeln!(out, "  {:>12}", machine::bytes(plan.bytes()))
}
