//! Metrics of experts that are read as they are needed.

use kv_backend::ExpertUse;

use super::ServiceValue;

/// What experts of a model take.
pub(super) fn expert_values(found: ExpertUse) -> Vec<ServiceValue> {
    let values = [
        (
            "cellar_expert_bytes",
            "gauge",
            found.resident as f64,
            "Memory that experts take",
        ),
        (
            "cellar_expert_budget_bytes",
            "gauge",
            found.budget as f64,
            "Memory that experts of all models may take together",
        ),
        (
            "cellar_expert_model_bytes",
            "gauge",
            found.total as f64,
            "Memory that all experts would take",
        ),
        (
            "cellar_expert_hits_total",
            "counter",
            found.hits as f64,
            "Matrices of chosen experts that were in memory",
        ),
        (
            "cellar_expert_misses_total",
            "counter",
            found.misses as f64,
            "Matrices of chosen experts that were not in memory",
        ),
        (
            "cellar_expert_read_bytes_total",
            "counter",
            found.read as f64,
            "Bytes of experts that were read from the model's file",
        ),
        (
            "cellar_expert_wait_seconds_total",
            "counter",
            found.waited().as_secs_f64(),
            "Time that steps waited for experts to be read",
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
