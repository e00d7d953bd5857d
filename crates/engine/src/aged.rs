//! [`EngineConfig::layers`] and [`EngineConfig::model`]: a model as an engine computes it, and what
//! its tokens take.
//!
//! Knows no backend and no sizes.

use std::sync::Arc;

use kv_core::layers::LayerMap;
use kv_rows::{LayerRows, OldKvTypes, RowLayout};
use model_core::aged::with_layers;
use model_core::architecture::Model;

use crate::config::{ConfigError, EngineConfig, in_range};

impl EngineConfig {
    /// What each layer of the model remembers in an engine of this configuration: where old rows
    /// have types of their own, recent ones have layers of their own.
    ///
    /// # Errors
    /// [`ConfigError::NothingGetsOld`] where no layer has old rows.
    pub fn layers(&self, model: &dyn Model) -> Result<LayerMap, ConfigError> {
        let layers = model.layers();
        match self.kv_types.old {
            Some(old) if layers.recent().is_empty() => {
                let aged = layers.with_recent(old.recent);
                aged.ok_or(ConfigError::NothingGetsOld)
            }
            _ => Ok(layers.clone()),
        }
    }

    /// The model as an engine of this configuration computes it;
    /// [`Engine::new`](crate::Engine::new) does this itself.
    ///
    /// # Errors
    /// [`ConfigError::NothingGetsOld`] where no layer has old rows.
    pub fn model(&self, model: &Arc<dyn Model>) -> Result<Arc<dyn Model>, ConfigError> {
        let layers = self.layers(&**model)?;
        Ok(with_layers(Arc::clone(model), &layers))
    }

    /// Whether so many tokens can be recent, and others old.
    pub(crate) fn check_recent(&self, n_ctx: u32) -> Result<(), ConfigError> {
        let Some(OldKvTypes { recent, .. }) = self.kv_types.old else {
            return Ok(());
        };
        let most = n_ctx.saturating_sub(1) as usize;
        in_range("the number of recent tokens", recent.n_last as usize, most)?;
        match recent.n_first {
            0 => Ok(()),
            n => in_range("the number of first tokens", n as usize, most),
        }
    }

    /// Bytes of K and V that one more token of a long text takes: those of old rows, where these
    /// are kept apart.
    ///
    /// # Errors
    /// [`ConfigError`] where the types do not fit the model.
    pub fn bytes_per_token(&self, model: &dyn Model) -> Result<u64, ConfigError> {
        let layers = self.layers(model)?;
        let one_cell = vec![1; layers.parts().len()];
        let layout = RowLayout::new(&layers, &one_cell, &self.kv_types)?;
        let is_recent = |layer| layers.recent().iter().any(|rows| rows.layer == layer);
        let of_all = layout.layers().iter().filter(|rows| !is_recent(rows.layer));
        Ok(of_all.map(LayerRows::bytes).sum())
    }
}
