//! Spans of requests over OTLP, where OpenTelemetry's environment variables name a collector.
//!
//! Invariant: a variable that names one is obeyed, or a line says that this program cannot. Knows
//! nothing of what spans say.

use std::sync::Arc;

use cellar_server::ObserveRequests;

/// The variables that name a collector.
const ENDPOINTS: [&str; 2] = [
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
];

/// The variable that names a collector, where spans are wanted.
fn endpoint() -> Option<&'static str> {
    let value = |name: &str| std::env::var(name).unwrap_or_default();
    let is_off = value("OTEL_SDK_DISABLED").eq_ignore_ascii_case("true")
        || value("OTEL_TRACES_EXPORTER") == "none";
    let is_set = |name: &&str| !is_off && !value(name).is_empty();
    ENDPOINTS.into_iter().find(is_set)
}

/// What exports spans.
pub(super) struct SpanExport {
    #[cfg(feature = "otlp")]
    spans: Option<Arc<cellar_telemetry::otlp::Spans>>,
}

#[cfg(feature = "otlp")]
impl SpanExport {
    /// Starts to export, where it is wanted.
    ///
    /// # Errors
    /// Where the endpoint is none, or another protocol is asked for.
    pub(super) fn start() -> anyhow::Result<Self> {
        use anyhow::Context;
        let spans = match endpoint() {
            Some(name) => {
                let spans = cellar_telemetry::otlp::Spans::export(None);
                let spans = spans.with_context(|| format!("cannot export spans as {name} says"))?;
                Some(Arc::new(spans))
            }
            None => None,
        };
        Ok(Self { spans })
    }

    /// What takes the reports of a server.
    pub(super) fn observer(&self) -> Option<Arc<dyn ObserveRequests>> {
        let spans = self.spans.clone()?;
        Some(spans)
    }

    /// Sends what waits.
    pub(super) fn close(&self) {
        if let Some(spans) = &self.spans {
            spans.close();
        }
    }
}

#[cfg(not(feature = "otlp"))]
impl SpanExport {
    /// Says that there is no export, where it is wanted.
    ///
    /// # Errors
    /// None.
    pub(super) fn start() -> anyhow::Result<Self> {
        if let Some(name) = endpoint() {
            crate::terminal::note(format_args!(
                "{name} is set, but no spans are exported: build the program with --features otlp"
            ));
        }
        Ok(Self {})
    }

    /// None.
    pub(super) fn observer(&self) -> Option<Arc<dyn ObserveRequests>> {
        None
    }

    /// There is nothing to send.
    pub(super) fn close(&self) {}
}
