//! Performance counters of contexts.
//!
//! Invariant: a batch of one token counts as generated, a longer one as a prompt, as in llama.cpp.
//! Measures nothing itself.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::abi::ContextPerf;
use crate::context::{Context, context};
use crate::ffi::{Handle, c_api};
use crate::log;

/// The times of batches.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    started: Instant,
    load_ms: f64,
    prompt: Duration,
    n_prompt: i32,
    generation: Duration,
    n_generated: i32,
}

impl Times {
    /// Nothing yet.
    pub(crate) fn starting(started: Instant, load_ms: f64) -> Self {
        Self {
            started,
            load_ms,
            prompt: Duration::ZERO,
            n_prompt: 0,
            generation: Duration::ZERO,
            n_generated: 0,
        }
    }

    /// Adds a batch.
    pub(crate) fn add(&mut self, n_tokens: usize, took: Duration) {
        if n_tokens == 1 {
            self.generation += took;
            self.n_generated = self.n_generated.saturating_add(1);
        } else {
            let n = i32::try_from(n_tokens).unwrap_or(i32::MAX);
            self.prompt += took;
            self.n_prompt = self.n_prompt.saturating_add(n);
        }
    }

    fn data(&self) -> ContextPerf {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        ContextPerf {
            t_start_ms: ms(self.started.saturating_duration_since(epoch())),
            t_load_ms: self.load_ms,
            t_p_eval_ms: ms(self.prompt),
            t_eval_ms: ms(self.generation),
            n_p_eval: self.n_prompt,
            n_eval: self.n_generated,
            n_reused: 0,
        }
    }
}

/// The moment that times are counted from.
fn epoch() -> Instant {
    static EPOCH: OnceLock<Instant> = OnceLock::new();
    *EPOCH.get_or_init(Instant::now)
}

c_api! {
    fn llama_time_us() -> i64 = 0; {
        i64::try_from(epoch().elapsed().as_micros()).unwrap_or(i64::MAX)
    }

    fn llama_perf_context(handle: Handle<Context>) -> ContextPerf = ContextPerf::default(); {
        let context = context("llama_perf_context", handle);
        context.map_or_else(ContextPerf::default, |context| context.lock().times.data())
    }

    fn llama_perf_context_print(handle: Handle<Context>); {
        if let Some(context) = context("llama_perf_context_print", handle) {
            let data = context.lock().times.data();
            let rate = |n: i32, ms: f64| f64::from(n) * 1e3 / ms.max(1e-9);
            log::info(&format!("load:       {:.2} ms", data.t_load_ms));
            log::info(&format!(
                "prompt:     {:.2} ms for {} tokens ({:.2} a second)",
                data.t_p_eval_ms, data.n_p_eval, rate(data.n_p_eval, data.t_p_eval_ms)
            ));
            log::info(&format!(
                "generation: {:.2} ms for {} tokens ({:.2} a second)",
                data.t_eval_ms, data.n_eval, rate(data.n_eval, data.t_eval_ms)
            ));
        }
    }

    fn llama_perf_context_reset(handle: Handle<Context>) ; {
        if let Some(context) = context("llama_perf_context_reset", handle) {
            let mut state = context.lock();
            state.times = Times::starting(Instant::now(), state.times.load_ms);
        }
    }
}
