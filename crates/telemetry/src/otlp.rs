//! [`Spans`]: what requests did, as spans over OTLP (HTTP, protobuf), for Jaeger, Tempo and other
//! collectors.
//!
//! A request is a span of kind server, part of the trace that its `traceparent` names. Each of its
//! texts is a span in it with the tokens and the reason of its end (OpenTelemetry's names for
//! generative AI), and in that are the times in the queue, to the first token and to the end:
//! `queue`, `prefill`, `decode`.
//!
//! Invariant: spans are made once a request has ended, and wait in a queue that is sent from a
//! thread of its own; what does not fit into it is dropped. A collector that is slow or gone
//! changes no answer.

use std::future::{Future, ready};
use std::io;
use std::pin::Pin;
use std::time::{Duration, SystemTime};

use axum::http::Method;
use bytes::Bytes;
use cellar_engine::serve::Usage;
use opentelemetry::trace::{
    Span, SpanBuilder, SpanContext, SpanKind, Status, TraceContextExt, TraceFlags, TracerProvider,
};
use opentelemetry::{Array, Context, KeyValue, SpanId, StringValue, TraceId, Value};
use opentelemetry_http::{HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{BatchSpanProcessor, SdkTracer, SdkTracerProvider};

use cellar_server::{ObserveRequests, RequestReport, TextEnd, TextReport, TraceParent};

/// How long a collector may take for what it is sent.
const SEND_TIME: Duration = Duration::from_secs(10);

/// Bytes of a collector's answer.
const MAX_ANSWER: u64 = 1 << 20;

/// Exports what requests did.
#[derive(Debug)]
pub struct Spans {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
}

impl Spans {
    /// Exports to the endpoint of a collector, to which `/v1/traces` is added; `None` takes
    /// OpenTelemetry's environment variables `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`, which is taken
    /// as it is, and `OTEL_EXPORTER_OTLP_ENDPOINT`. `OTEL_EXPORTER_OTLP_HEADERS`,
    /// `OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_TRACES_SAMPLER` and `OTEL_BSP_*` have
    /// their meaning, too.
    ///
    /// # Errors
    /// Where the endpoint is none, or the variables ask for another protocol than `http/protobuf`.
    pub fn export(endpoint: Option<&str>) -> io::Result<Self> {
        if endpoint.is_none() {
            check_protocol()?;
        }
        let exporter = SpanExporter::builder()
            .with_http()
            .with_protocol(Protocol::HttpBinary)
            .with_http_client(Client::new());
        let exporter = match endpoint {
            Some(base) => {
                exporter.with_endpoint(format!("{}/v1/traces", base.trim_end_matches('/')))
            }
            None => exporter,
        };
        let exporter = exporter.build().map_err(io::Error::other)?;
        let provider = SdkTracerProvider::builder()
            .with_resource(resource())
            .with_span_processor(BatchSpanProcessor::builder(exporter).build())
            .build();
        let tracer = provider.tracer("cellar");
        Ok(Self { provider, tracer })
    }

    /// Sends what waits, for as long as a collector may take, and ends the thread.
    pub fn close(&self) {
        if let Err(error) = self.provider.shutdown_with_timeout(SEND_TIME) {
            tracing::warn!(%error, "the last spans may be lost");
        }
    }

    /// A span that has ended, as a parent of others.
    fn add(&self, span: SpanBuilder, end: SystemTime, status: Status, parent: &Context) -> Context {
        let mut span = span.start_with_context(&self.tracer, parent);
        span.set_status(status);
        span.end_with_timestamp(end);
        Context::new().with_remote_span_context(span.span_context().clone())
    }

    /// A text of a request that came then.
    fn text(&self, text: &TextReport, came: SystemTime, parent: &Context) {
        let began = came + text.began;
        let mut attributes = vec![
            KeyValue::new("gen_ai.operation.name", "text_completion"),
            KeyValue::new("gen_ai.provider.name", "cellar"),
            KeyValue::new("gen_ai.request.model", text.model.clone()),
            KeyValue::new("gen_ai.usage.input_tokens", text.n_prompt as i64),
        ];
        attributes.extend(usage_attributes(&text.usage));
        let mut status = Status::Unset;
        match &text.end {
            TextEnd::Failed => status = Status::error("the text could not be computed"),
            TextEnd::Finished { .. } | TextEnd::Cancelled => {}
        }
        let reasons = vec![StringValue::from(text.end.word())];
        let reasons = Value::Array(Array::String(reasons));
        attributes.push(KeyValue::new("gen_ai.response.finish_reasons", reasons));
        let span = SpanBuilder::from_name(format!("text_completion {}", text.model))
            .with_kind(SpanKind::Internal)
            .with_start_time(began)
            .with_attributes(attributes);
        let parent = self.add(span, began + text.took, status, parent);
        if !matches!(text.end, TextEnd::Finished { .. }) {
            return;
        }
        let usage = &text.usage;
        // Where its time went, by the clock of the service: within the span.
        let first_token = usage.first_token.unwrap_or(usage.total);
        let mut from = Duration::ZERO;
        for (name, to) in [
            ("queue", usage.queued),
            ("prefill", first_token),
            ("decode", usage.total),
        ] {
            let to = to.clamp(from, text.took.max(from));
            let span = SpanBuilder::from_name(name).with_start_time(began + from);
            self.add(span, began + to, Status::Unset, &parent);
            from = to;
        }
    }
}

impl ObserveRequests for Spans {
    /// Takes each POST that was let in.
    fn ended(&self, report: &RequestReport) {
        if report.method != Method::POST || !report.is_let_in {
            return;
        }
        let parent = report.parent.map_or_else(Context::new, context);
        let mut attributes = vec![
            KeyValue::new("http.request.method", report.method.to_string()),
            KeyValue::new("http.route", report.route.clone()),
        ];
        let mut status = Status::Unset;
        if let Some(code) = report.status {
            let code = i64::from(code.as_u16());
            attributes.push(KeyValue::new("http.response.status_code", code));
            if code >= 500 {
                status = Status::error("");
            }
        }
        let span = SpanBuilder::from_name(format!("{} {}", report.method, report.route))
            .with_kind(SpanKind::Server)
            .with_start_time(report.began)
            .with_attributes(attributes);
        let parent = self.add(span, report.began + report.took, status, &parent);
        for text in &report.texts {
            self.text(text, report.began, &parent);
        }
    }
}

/// What a text took, under OpenTelemetry's names, and vLLM's where it has none.
fn usage_attributes(usage: &Usage) -> Vec<KeyValue> {
    let seconds = |time: Duration| time.as_secs_f64();
    let mut attributes = vec![
        KeyValue::new("gen_ai.usage.output_tokens", usage.n_tokens as i64),
        KeyValue::new(
            "gen_ai.usage.cache_read.input_tokens",
            usage.n_reused() as i64,
        ),
        KeyValue::new("gen_ai.latency.time_in_queue", seconds(usage.queued)),
    ];
    if let Some(first_token) = usage.first_token {
        let name = "gen_ai.latency.time_to_first_token";
        attributes.push(KeyValue::new(name, seconds(first_token)));
    }
    attributes
}

/// The span of another process as a parent.
fn context(parent: TraceParent) -> Context {
    let parent = SpanContext::new(
        TraceId::from(parent.trace),
        SpanId::from(parent.parent),
        TraceFlags::new(parent.flags),
        true,
        Default::default(),
    );
    Context::new().with_remote_span_context(parent)
}

/// # Errors
/// Where the environment asks for a protocol that is not spoken.
fn check_protocol() -> io::Result<()> {
    for name in [
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
        "OTEL_EXPORTER_OTLP_PROTOCOL",
    ] {
        match std::env::var(name).unwrap_or_default().as_str() {
            "" => {}
            "http/protobuf" => break,
            other => {
                let message = format!("{name} is '{other}': only http/protobuf is supported");
                return Err(io::Error::new(io::ErrorKind::Unsupported, message));
            }
        }
    }
    Ok(())
}

/// Who sends spans: `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES`, and where they name no
/// service, cellar.
fn resource() -> Resource {
    let is_set = |name: &str| std::env::var(name).is_ok_and(|value| !value.is_empty());
    let attributes = std::env::var("OTEL_RESOURCE_ATTRIBUTES").unwrap_or_default();
    let is_named = is_set("OTEL_SERVICE_NAME") || attributes.contains("service.name=");
    let resource = Resource::builder();
    let resource = if is_named {
        resource
    } else {
        resource.with_service_name("cellar")
    };
    let version = KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
    resource.with_attribute(version).build()
}

/// Sends batches, on the thread that waits for them.
#[derive(Debug)]
struct Client(ureq::Agent);

impl Client {
    fn new() -> Self {
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(SEND_TIME))
            .http_status_as_error(false)
            .build();
        Self(config.into())
    }

    fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let response = self.0.run(request.map(|body| body.to_vec()))?;
        let (head, mut body) = response.into_parts();
        let body = body.with_config().limit(MAX_ANSWER).read_to_vec()?;
        if !head.status.is_success() {
            tracing::warn!(status = %head.status, "the collector refused spans");
        }
        Ok(Response::from_parts(head, Bytes::from(body)))
    }
}

impl HttpClient for Client {
    fn send_bytes<'c, 'f>(
        &'c self,
        request: Request<Bytes>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'f>>
    where
        'c: 'f,
        Self: 'f,
    {
        let sent = self.send(request);
        if let Err(error) = &sent {
            tracing::warn!(%error, "the collector cannot be reached");
        }
        Box::pin(ready(sent))
    }
}
