//! [`Metrics`]: what the server counts, as Prometheus text.
//!
//! Invariant: every request that was begun ends as exactly one of finished, failed or cancelled.
//! Names are `cellar_*`, with aliases under vLLM's names, which routers know.

mod experts;
mod histogram;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cellar_engine::serve::{Missed, Usage};

use crate::error::ApiError;
use crate::memory_use::{MemoryUse, Use};
use crate::model::Work;
use crate::models::{LoadState, ModelStatus};
use crate::verify::Verification;
use histogram::Histogram;

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Ended {
    Finished,
    Failed,
    Cancelled,
}

/// What the server counts.
#[derive(Debug, Default)]
pub struct Metrics {
    counts: Mutex<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    ended: BTreeMap<&'static str, u64>,
    refused: BTreeMap<u16, u64>,
    n_prompt: u64,
    n_reused: u64,
    n_generated: u64,
    n_preempted: u64,
    n_verified: u64,
    n_mismatched: u64,
    missed: BTreeMap<&'static str, u64>,
    first_token: Histogram,
    total: Histogram,
    queued: Histogram,
    gaps: Histogram,
}

fn line(out: &mut String, text: std::fmt::Arguments<'_>) {
    // Writing to a String does not fail.
    let _ = writeln!(out, "{text}");
}

/// Why a prompt was not reused, in one word.
pub(crate) fn missed_name(missed: Option<Missed>) -> &'static str {
    missed.map_or("none", |missed| missed.name())
}

impl Counts {
    /// Adds what a text took. The times of one that ended early say nothing of others.
    fn add(&mut self, usage: &Usage, how: Ended) {
        self.n_prompt += match how {
            Ended::Finished => usage.n_prompt,
            Ended::Failed | Ended::Cancelled => usage.n_prompt_done,
        } as u64;
        self.n_generated += usage.n_tokens as u64;
        self.n_preempted += u64::from(usage.n_preemptions);
        if let Some(reuse) = usage.reuse {
            self.n_reused += reuse.n_tokens as u64;
            *self.missed.entry(missed_name(reuse.missed)).or_default() += 1;
        }
        if how != Ended::Finished {
            return;
        }
        self.queued.add(usage.queued);
        self.total.add(usage.total);
        if let Some(first) = usage.first_token {
            self.first_token.add(first);
        }
    }
}

impl Metrics {
    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A text has ended, and took this.
    pub(crate) fn ended(&self, how: Ended, usage: &Usage) {
        let name = match how {
            Ended::Finished => "finished",
            Ended::Failed => "failed",
            Ended::Cancelled => "cancelled",
        };
        let mut counts = self.lock();
        *counts.ended.entry(name).or_default() += 1;
        counts.add(usage, how);
    }

    pub(crate) fn refused(&self, error: &ApiError) {
        *self
            .lock()
            .refused
            .entry(error.status.as_u16())
            .or_default() += 1;
    }

    /// Adds a text that was computed again.
    pub(crate) fn verified(&self, verification: Verification) {
        let mut counts = self.lock();
        counts.n_verified += 1;
        counts.n_mismatched += u64::from(verification == Verification::Other);
    }

    /// Adds the time from one piece of a text to the next.
    pub(crate) fn gap(&self, time: Duration) {
        self.lock().gaps.add(time);
    }

    /// Seconds after which one of so many waiting requests may have ended, from the mean time of
    /// those that have; between 1 and 60.
    pub(crate) fn retry_after(&self, n_queued: usize, n_parallel: usize) -> u64 {
        let total = self.lock().total;
        let mean = match total.n {
            0 => 1.0,
            n => total.sum / n as f64,
        };
        let rounds = n_queued as f64 / n_parallel.max(1) as f64;
        // From 1 to 60, so the number fits.
        (mean * rounds).ceil().clamp(1.0, 60.0) as u64
    }

    /// Everything, as Prometheus reads it, with what the memory of each model is used for, by its
    /// id.
    pub(crate) fn text(
        &self,
        models: &[ModelStatus],
        uses: &BTreeMap<String, MemoryUse>,
    ) -> String {
        let mut out = String::new();
        let loads = models
            .iter()
            .map(|status| (status.id.as_str(), load_values(status)));
        write_services(&loads.collect::<Vec<_>>(), &mut out);
        let loaded = models.iter().filter_map(|status| status.model.as_deref());
        let services = loaded.filter_map(|model| match model.work() {
            Work::Texts(service) => Some((model.id(), service.n_queued(), service.status())),
            Work::Embeddings(_) | Work::Scores(_) => None,
        });
        let services: Vec<_> = services.collect();
        let values = services
            .iter()
            .map(|&(id, n, status)| (id, service_values(n, status)));
        write_services(&values.collect::<Vec<_>>(), &mut out);
        let experts = services.iter().filter_map(|&(id, _, status)| {
            let found = status.experts?;
            Some((id, experts::expert_values(found)))
        });
        write_services(&experts.collect::<Vec<_>>(), &mut out);
        write_uses(uses, &mut out);
        let counts = self.lock();
        let out_ref = &mut out;
        head(
            out_ref,
            "cellar_requests_total",
            "counter",
            "Requests that have ended",
        );
        for (how, n) in &counts.ended {
            line(
                out_ref,
                format_args!("cellar_requests_total{{end=\"{how}\"}} {n}"),
            );
        }
        head(
            out_ref,
            "cellar_refused_total",
            "counter",
            "Requests that were not begun",
        );
        for (status, n) in &counts.refused {
            line(
                out_ref,
                format_args!("cellar_refused_total{{status=\"{status}\"}} {n}"),
            );
        }
        write_counters(&counts, out_ref);
        let name = "cellar_prefix_misses_total";
        head(
            out_ref,
            name,
            "counter",
            "Why a prompt was not reused up to its end",
        );
        for (reason, n) in &counts.missed {
            line(out_ref, format_args!("{name}{{reason=\"{reason}\"}} {n}"));
        }
        write_histograms(&counts, out_ref);
        drop(counts);
        out
    }
}

/// Writes what ended requests took, under our names and vLLM's.
fn write_counters(counts: &Counts, out: &mut String) {
    for (name, aliases, n, help) in [
        (
            "cellar_prompt_tokens_total",
            // All tokens of prompts are looked up.
            &[
                "vllm:prompt_tokens_total",
                "vllm:prefix_cache_queries_total",
            ][..],
            counts.n_prompt,
            "Tokens of prompts",
        ),
        (
            "cellar_reused_tokens_total",
            &["vllm:prefix_cache_hits_total"],
            counts.n_reused,
            "Tokens of prompts that were cached",
        ),
        (
            "cellar_generated_tokens_total",
            &["vllm:generation_tokens_total"],
            counts.n_generated,
            "Tokens of answers",
        ),
        (
            "cellar_preemptions_total",
            &["vllm:num_preemptions_total"],
            counts.n_preempted,
            "Preemptions of finished requests",
        ),
        (
            "cellar_verified_total",
            &[],
            counts.n_verified,
            "Texts that were computed again (--verify)",
        ),
        (
            "cellar_mismatch_total",
            &[],
            counts.n_mismatched,
            "Of these, those that were other texts then",
        ),
    ] {
        with_aliases(name, aliases, help, |name, help| {
            head(out, name, "counter", help);
            line(out, format_args!("{name} {n}"));
        });
    }
}

/// Writes how long requests took, under our names and vLLM's.
fn write_histograms(counts: &Counts, out: &mut String) {
    for (name, aliases, histogram, help) in [
        (
            "cellar_time_to_first_token_seconds",
            &["vllm:time_to_first_token_seconds"][..],
            counts.first_token,
            "From request to first token",
        ),
        (
            "cellar_request_seconds",
            &["vllm:e2e_request_latency_seconds"],
            counts.total,
            "From request to end",
        ),
        (
            "cellar_queue_seconds",
            &[],
            counts.queued,
            "From request to admission",
        ),
        (
            "cellar_inter_token_seconds",
            &["vllm:inter_token_latency_seconds"],
            counts.gaps,
            "From a piece of a text, of a token or a few, to the next",
        ),
    ] {
        with_aliases(name, aliases, help, |name, help| {
            head(out, name, "histogram", help);
            histogram.write(name, out);
        });
    }
}

/// Writes a metric under its name, then under other programs' names for it.
fn with_aliases(name: &str, aliases: &[&str], help: &str, mut write: impl FnMut(&str, &str)) {
    write(name, help);
    let help = format!("As {name}");
    aliases.iter().for_each(|alias| write(alias, &help));
}

/// Writes what the memory of each model is used for.
fn write_uses(uses: &BTreeMap<String, MemoryUse>, out: &mut String) {
    let write = |name: &str, labels: &str, found: Use, out: &mut String| {
        let Use {
            running,
            cached,
            free,
        } = found;
        for (kind, n) in [("running", running), ("cached", cached), ("free", free)] {
            line(out, format_args!("{name}{{{labels},use=\"{kind}\"}} {n}"));
        }
    };
    if uses.is_empty() {
        return;
    }
    let label = |model: &str| format!("model_name=\"{}\"", escape(model));
    let name = "cellar_part_cells";
    head(out, name, "gauge", "KV cells of each part by their use");
    for (model, found) in uses {
        for (part, cells) in found.parts.iter().enumerate() {
            let labels = format!("{},part=\"{part}\"", label(model));
            write(name, &labels, *cells, out);
        }
    }
    let name = "cellar_states";
    head(out, name, "gauge", "Rows of recurrent states by their use");
    for (model, found) in uses {
        if let Some(states) = found.states {
            write(name, &label(model), states, out);
        }
    }
    let name = "vllm:kv_cache_usage_perc";
    let help = "Share of the KV cells that running requests have, from 0 to 1";
    head(out, name, "gauge", help);
    for (model, found) in uses {
        let share = found.running_share();
        line(out, format_args!("{name}{{{}}} {share}", label(model)));
    }
}

fn head(out: &mut String, name: &str, kind: &str, help: &str) {
    line(out, format_args!("# HELP {name} {help}"));
    line(out, format_args!("# TYPE {name} {kind}"));
}

/// A value that each model has, or each service.
struct ServiceValue {
    name: &'static str,
    kind: &'static str,
    help: &'static str,
    value: String,
}

/// Writes the values of these models: the lines of a name are one group below one head, as
/// Prometheus has it.
fn write_services(services: &[(&str, Vec<ServiceValue>)], out: &mut String) {
    let Some((_, first)) = services.first() else {
        return;
    };
    for (at, one) in first.iter().enumerate() {
        let name = one.name;
        head(out, name, one.kind, one.help);
        for (model, values) in services {
            if let Some(ServiceValue { value, .. }) = values.get(at) {
                let label = escape(model);
                line(
                    out,
                    format_args!("{name}{{model_name=\"{label}\"}} {value}"),
                );
            }
        }
    }
}

/// The value of a label.
fn escape(text: &str) -> String {
    text.replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

/// What is known of a model, loaded or not.
fn load_values(status: &ModelStatus) -> Vec<ServiceValue> {
    let is_loaded = u64::from(status.state == LoadState::Loaded);
    let values = [
        (
            "cellar_model_loaded",
            "gauge",
            is_loaded,
            "Whether the model is in memory",
        ),
        (
            "cellar_model_bytes",
            "gauge",
            status.bytes.total(),
            "Memory that the model takes",
        ),
        (
            "cellar_model_requests",
            "gauge",
            status.n_uses as u64,
            "Requests that use the model",
        ),
        (
            "cellar_model_loads_total",
            "counter",
            status.counts.n_loads,
            "How often the model was loaded",
        ),
        (
            "cellar_model_unloads_total",
            "counter",
            status.counts.n_unloads,
            "How often the model was unloaded",
        ),
        (
            "cellar_model_load_failures_total",
            "counter",
            status.counts.n_failures,
            "How often the model could not be loaded",
        ),
    ];
    let values = values.map(|(name, kind, value, help)| ServiceValue {
        name,
        kind,
        help,
        value: value.to_string(),
    });
    values.into_iter().collect()
}

/// The counts of the store of prefixes.
fn store_counters(
    status: &cellar_engine::serve::ServiceStatus,
) -> [(&'static str, u64, &'static str); 7] {
    [
        (
            "cellar_restored_tokens_total",
            status.counters.n_restored_tokens,
            "Tokens that came back from the store of prefixes",
        ),
        (
            "cellar_store_fetched_bytes_total",
            status.tiers.fetched_bytes,
            "Bytes that were fetched from the store of prefixes",
        ),
        (
            "cellar_store_stored_bytes_total",
            status.tiers.stored_bytes,
            "Bytes that were put into the store of prefixes",
        ),
        (
            "cellar_store_not_stored_total",
            status.tiers.n_not_stored,
            "Groups of tokens that a tier of the store had no room or time for",
        ),
        (
            "cellar_store_refused_total",
            status.tiers.n_refused,
            "Groups that were not what was stored: damaged, forged or of another version",
        ),
        (
            "cellar_store_failed_total",
            status.tiers.n_failed,
            "Questions to the store that had no answer in time",
        ),
        (
            "cellar_store_down_total",
            status.tiers.n_down,
            "How often a tier of the store did not work",
        ),
    ]
}

fn service_values(
    n_queued: usize,
    status: cellar_engine::serve::ServiceStatus,
) -> Vec<ServiceValue> {
    let gauges = [
        (
            "cellar_requests_waiting",
            n_queued as f64,
            "Requests that wait to be admitted",
        ),
        (
            "cellar_requests_running",
            status.n_running as f64,
            "Requests that are computed",
        ),
        (
            "cellar_kv_cells",
            f64::from(status.n_cells),
            "KV cells of the largest part",
        ),
        (
            "cellar_kv_cells_used",
            f64::from(status.n_cells_used),
            "KV cells that hold tokens, cached prefixes among them",
        ),
        (
            "cellar_swapped_bytes",
            status.swapped_bytes as f64,
            "Bytes of the host that preempted requests have",
        ),
        (
            "cellar_spilled_bytes",
            status.spilled_bytes as f64,
            "Bytes of the disk that preempted requests have",
        ),
        (
            "vllm:num_requests_waiting",
            n_queued as f64,
            "As cellar_requests_waiting",
        ),
        (
            "vllm:num_requests_running",
            status.n_running as f64,
            "As cellar_requests_running",
        ),
    ];
    let counters = [
        (
            "cellar_steps_total",
            status.counters.n_steps,
            "Steps of the engine",
        ),
        (
            "cellar_step_tokens_total",
            status.counters.n_tokens,
            "Tokens of these steps",
        ),
        (
            "cellar_drafted_tokens_total",
            status.counters.n_drafted_tokens,
            "Tokens that were drafted and computed",
        ),
        (
            "cellar_accepted_tokens_total",
            status.counters.n_accepted_tokens,
            "Drafted tokens that texts have",
        ),
        (
            "cellar_shared_tokens_total",
            status.counters.n_shared_tokens,
            "Tokens of prompts that were taken from requests that run",
        ),
        (
            "cellar_prefix_waits_total",
            status.counters.n_waits,
            "Waits for a prefix that another request was computing",
        ),
        (
            "cellar_swapped_bytes_total",
            status.counters.n_swapped_bytes,
            "Bytes of preempted requests that went to the host",
        ),
        (
            "cellar_spilled_bytes_total",
            status.counters.n_spilled_bytes,
            "Bytes of these that went on to the disk",
        ),
        (
            "cellar_swap_lost_total",
            status.counters.n_swap_lost,
            "Saved states that could not be restored, and were computed again",
        ),
        (
            "cellar_evicted_prefixes_total",
            status.counters.n_evicted,
            "Cached prefixes that were dropped",
        ),
    ];
    let gauges = gauges.map(|(name, value, help)| ServiceValue {
        name,
        kind: "gauge",
        help,
        value: value.to_string(),
    });
    let counters = counters.into_iter().chain(store_counters(&status));
    let counters = counters.map(|(name, value, help)| ServiceValue {
        name,
        kind: "counter",
        help,
        value: value.to_string(),
    });
    gauges.into_iter().chain(counters).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_written_once_for_all_models() {
        let values = || service_values(0, cellar_engine::serve::ServiceStatus::default());
        let mut out = String::new();
        write_services(&[("a", values()), ("\"b", values())], &mut out);
        let name = "cellar_requests_running";
        let head = format!("# TYPE {name} gauge\n");
        let lines = format!("{name}{{model_name=\"a\"}} 0\n{name}{{model_name=\"\\\"b\"}} 0\n");
        assert!(out.contains(&format!("{head}{lines}")), "{out}");
        assert_eq!(out.matches(&head).count(), 1);
    }
}
