//! The settings that `/set` changes during a conversation.
//!
//! Invariant: the sampler's configuration is valid; a value that is refused changes nothing. Knows
//! nothing of the model.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use cellar_engine::sampler::{SamplerConfig, random_seed};
use clap::ValueEnum;

use crate::args::{Seed, answer_limit, thinking_limit};
use crate::commands::answer::ShowThinking;
use crate::failure::usage;

/// The settings.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    /// How tokens are sampled.
    pub(super) sampler: SamplerConfig,
    /// Maximum tokens per answer.
    pub(super) n_predict: Option<usize>,
    /// Whether thinking is printed.
    pub(super) show_thinking: ShowThinking,
    /// Maximum tokens of thinking.
    pub(super) reasoning_tokens: Option<usize>,
}

impl Settings {
    /// Changes a setting.
    ///
    /// # Errors
    /// A usage error where there is no such setting, or the value is no value of it.
    pub(super) fn set(&mut self, name: &str, value: &str) -> anyhow::Result<()> {
        let mut sampler = self.sampler.clone();
        let penalties = &mut sampler.penalties;
        match name {
            "temp" => sampler.temperature = number(name, value)?,
            "top-k" if value == "-1" => sampler.top_k = None,
            "top-k" => sampler.top_k = NonZeroU32::new(number(name, value)?),
            "top-p" => sampler.top_p = number(name, value)?,
            "min-p" => sampler.min_p = number(name, value)?,
            "top-nsigma" => sampler.top_n_sigma = number(name, value)?,
            "repeat-penalty" => penalties.repeat = number(name, value)?,
            "presence-penalty" => penalties.presence = number(name, value)?,
            "frequency-penalty" => penalties.frequency = number(name, value)?,
            "typical" => sampler.typical_p = number(name, value)?,
            "xtc-probability" => sampler.xtc.probability = number(name, value)?,
            "xtc-threshold" => sampler.xtc.threshold = number(name, value)?,
            "dry-multiplier" => sampler.dry.multiplier = number(name, value)?,
            "min-tokens" => sampler.min_tokens = number(name, value)?,
            "seed" => {
                sampler.seed = match value.parse() {
                    Ok(Seed::Fixed(seed)) => seed,
                    Ok(Seed::Random) => random_seed(),
                    Err(wanted) => return refused(name, value, &wanted),
                }
            }
            "predict" => match answer_limit(value) {
                Ok(limit) => self.n_predict = limit.tokens(),
                Err(wanted) => return refused(name, value, &wanted),
            },
            "reasoning-budget" => match thinking_limit(value) {
                Ok(limit) => self.reasoning_tokens = limit.tokens(),
                Err(wanted) => return refused(name, value, &wanted),
            },
            "show-thinking" => match ShowThinking::from_str(value, false) {
                Ok(show) => self.show_thinking = show,
                Err(_) => return usage("show-thinking is auto, always or never"),
            },
            _ => {
                return usage(format!(
                    "there is no setting '{name}': /set shows all of them"
                ));
            }
        }
        if let Err(error) = sampler.check() {
            return usage(error.to_string());
        }
        self.sampler = sampler;
        Ok(())
    }
}

fn refused(name: &str, value: &str, wanted: &str) -> anyhow::Result<()> {
    usage(format!("'{value}' is no value of {name}: {wanted}"))
}

fn number<T: FromStr>(name: &str, value: &str) -> anyhow::Result<T> {
    match value.parse() {
        Ok(number) => Ok(number),
        Err(_) => usage(format!("'{value}' is no number that {name} can be")),
    }
}

/// One line each, as `/set` takes them.
impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SamplerConfig {
            temperature,
            top_n_sigma,
            top_k,
            top_p,
            min_p,
            typical_p,
            xtc,
            dry,
            min_tokens,
            penalties,
            seed,
            // Given by flags alone.
            logit_bias: _,
            mirostat: _,
        } = &self.sampler;
        let limit = |n: Option<usize>| n.map_or_else(|| "-1".to_owned(), |n| n.to_string());
        let show_thinking = self.show_thinking.to_possible_value();
        let lines = [
            ("temp", temperature.to_string()),
            ("top-nsigma", top_n_sigma.to_string()),
            ("top-k", top_k.map_or(0, NonZeroU32::get).to_string()),
            ("top-p", top_p.to_string()),
            ("min-p", min_p.to_string()),
            ("repeat-penalty", penalties.repeat.to_string()),
            ("presence-penalty", penalties.presence.to_string()),
            ("frequency-penalty", penalties.frequency.to_string()),
            ("typical", typical_p.to_string()),
            ("xtc-probability", xtc.probability.to_string()),
            ("xtc-threshold", xtc.threshold.to_string()),
            ("dry-multiplier", dry.multiplier.to_string()),
            ("min-tokens", min_tokens.to_string()),
            ("seed", seed.to_string()),
            ("predict", limit(self.n_predict)),
            ("reasoning-budget", limit(self.reasoning_tokens)),
            (
                "show-thinking",
                show_thinking.map_or_else(String::new, |value| value.get_name().to_owned()),
            ),
        ];
        let lines = lines.map(|(name, value)| format!("  {name:<18} {value}"));
        f.write_str(&lines.join("\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> Settings {
        Settings {
            sampler: SamplerConfig::default(),
            n_predict: None,
            show_thinking: ShowThinking::Auto,
            reasoning_tokens: None,
        }
    }

    #[test]
    fn every_setting_that_is_shown_can_be_set_to_what_is_shown() {
        let mut settings = settings();
        let shown = settings.to_string();
        for line in shown.lines() {
            let (name, value) = line.trim().split_once(' ').unwrap();
            settings.set(name, value.trim()).unwrap();
        }
        assert_eq!(settings.to_string(), shown);
        settings.set("predict", "7").unwrap();
        settings.set("reasoning-budget", "0").unwrap();
        assert_eq!(settings.reasoning_tokens, Some(0));
        settings.set("top-k", "0").unwrap();
        settings.set("seed", "-1").unwrap();
        settings.set("show-thinking", "never").unwrap();
        assert_eq!(
            (settings.n_predict, settings.sampler.top_k),
            (Some(7), None)
        );
        assert_eq!(settings.show_thinking, ShowThinking::Never);
        settings.set("predict", "-1").unwrap();
        assert_eq!(settings.n_predict, None);
    }

    #[test]
    fn what_is_refused_changes_nothing() {
        let mut settings = settings();
        let before = settings.to_string();
        for (name, value, wanted) in [
            ("temp", "warm", "'warm' is no number"),
            ("temp", "-1", "temperature -1"),
            ("top-p", "2", "top-p 2 is not between 0 and 1"),
            ("top-k", "many", "'many' is no number"),
            ("seed", "-2", "'-2' is no value of seed: a number"),
            (
                "predict",
                "0",
                "'0' is no value of predict: a number of at least 1",
            ),
            ("show-thinking", "maybe", "auto, always or never"),
            ("heat", "1", "there is no setting 'heat'"),
        ] {
            let message = settings.set(name, value).unwrap_err().to_string();
            assert!(message.contains(wanted), "{name} {value}: {message}");
        }
        assert_eq!(settings.to_string(), before);
    }
}
