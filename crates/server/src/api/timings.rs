//! [`timings`]: how long a text took, in llama-server's words, which its clients also read in
//! answers of OpenAI's form.

use cellar_engine::serve::Usage;
use serde_json::{Value, json};

/// The computed part of a prompt, in llama-server's words.
pub(super) fn prompt_progress(usage: &Usage) -> Value {
    json!({
        "total": usage.n_prompt,
        "cache": usage.n_reused(),
        "processed": usage.n_prompt_done,
        "time_ms": usage.total.saturating_sub(usage.queued).as_millis() as u64,
    })
}

/// Times and speeds of a text, in milliseconds and tokens per second.
pub(super) fn timings(usage: &Usage) -> Value {
    let reused = usage.n_reused();
    let first = usage.first_token.unwrap_or(usage.total);
    let prompt = first.saturating_sub(usage.queued).as_secs_f64();
    let predicted = usage.total.saturating_sub(first).as_secs_f64();
    let (n_prompt, n_predicted) = (usage.n_prompt - reused, usage.n_tokens);
    let speed = |n: usize, seconds: f64| {
        if seconds > 0.0 {
            n as f64 / seconds
        } else {
            0.0
        }
    };
    let mut timings = json!({
        "cache_n": reused,
        "prompt_n": n_prompt,
        "prompt_ms": prompt * 1e3,
        "prompt_per_second": speed(n_prompt, prompt),
        "predicted_n": n_predicted,
        "predicted_ms": predicted * 1e3,
        // The first token belongs to the prompt's time.
        "predicted_per_second": speed(n_predicted.saturating_sub(1), predicted),
    });
    if usage.speculated.n_drafted > 0 {
        timings["draft_n"] = json!(usage.speculated.n_drafted);
        timings["draft_n_accepted"] = json!(usage.speculated.n_accepted);
    }
    timings
}
