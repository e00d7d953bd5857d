//! Adapters that come and go while an engine computes.
//!
//! Invariant: an exchange that fails leaves the engine with the adapters that it had. What the
//! memory holds stays as it was computed: who exchanges adapters decides what of it is of use.

use std::sync::Arc;

use kv_backend::Backend;
use kv_backend::state::Fingerprint;
use kv_core::memory::Memory;
use kv_graph::GraphShape;
use model_core::adapters::{AdaptedModel, Adapters};
use model_core::architecture::Model;

use crate::adapters::ActiveAdapters;
use crate::decode::Engine;
use crate::error::EngineError;
use crate::runner::{ProgramKey, RowsOut, Runner};
use crate::state::fingerprint_of;

/// A model, and the adapters of its sequences.
struct AdaptersInUse {
    model: Arc<dyn Model>,
    active: Option<ActiveAdapters>,
}

/// The shape of a token.
const ONE: GraphShape = GraphShape {
    n_tokens: 1,
    n_outputs: 1,
};

impl<B: Backend, M: Memory> Engine<B, M> {
    /// Gives the model these adapters in place of those that it got before, or none. Their default
    /// scales are those of all sequences from now on. The model's own weights stay loaded.
    ///
    /// A [`Session`](crate::session::Session) knows the adapters that its engine had when it was
    /// made.
    ///
    /// # Errors
    /// [`EngineError::LoadedWithAdapters`]; [`EngineError::Adapters`] where the model's graphs take
    /// none; [`EngineError::Backend`] where the device has no room for them. The engine has those
    /// of before then.
    pub fn exchange_adapters(
        &mut self,
        adapters: Option<Arc<Adapters>>,
    ) -> Result<(), EngineError> {
        let runner = &mut self.runner;
        if runner.loaded.adapters().is_some() {
            return Err(EngineError::LoadedWithAdapters);
        }
        let loaded = Arc::clone(&runner.loaded);
        let model = match &adapters {
            Some(adapters) => Arc::new(AdaptedModel::new(loaded, Arc::clone(adapters))?),
            None => loaded,
        };
        let active = adapters.map(ActiveAdapters::new);
        let before = runner.replace(AdaptersInUse { model, active })?;
        match runner.compile_one().and_then(|()| runner.fingerprint()) {
            Ok(fingerprint) => {
                self.fingerprint = fingerprint;
                Ok(())
            }
            Err(error) => {
                runner.replace(before)?;
                Err(error)
            }
        }
    }

    /// The scales of the sequences that were not given [others](Engine::set_adapters), one for each
    /// adapter of the model.
    pub fn default_scales(&self) -> Vec<f32> {
        let active = self.runner.adapters.as_ref();
        active.map_or(Vec::new(), |active| active.default_scales().to_vec())
    }

    /// Gives the sequences these scales that were not given [others](Engine::set_adapters), one for
    /// each adapter. What they hold stays as it was computed.
    ///
    /// # Errors
    /// [`EngineError::NoAdapters`] where the model has none; [`EngineError::Adapters`] where there
    /// are more or fewer scales than adapters, or one is no number.
    pub fn set_default_scales(&mut self, scales: Arc<[f32]>) -> Result<(), EngineError> {
        let active = self.runner.adapters.as_mut();
        Ok(active.ok_or(EngineError::NoAdapters)?.set_default(scales)?)
    }
}

impl<B: Backend> Runner<B> {
    /// Puts a model with its adapters in the place of the one before, which it returns. What is
    /// needed is loaded and compiled when it is first computed.
    fn replace(&mut self, with: AdaptersInUse) -> Result<AdaptersInUse, EngineError> {
        let names_of = |model: &dyn Model| model.adapters().map(|all| all.weight_names());
        let names = [names_of(&*self.model), names_of(&*with.model)];
        let names: Vec<String> = names.into_iter().flatten().flatten().collect();
        self.backend.forget_weights(&self.weights, &names)?;
        self.programs.clear();
        self.source.set(with.model.adapters());
        Ok(AdaptersInUse {
            model: std::mem::replace(&mut self.model, with.model),
            active: std::mem::replace(&mut self.adapters, with.active),
        })
    }

    /// Compiles the graphs of a token without adapters and with one, so that what cannot be
    /// computed is found now.
    fn compile_one(&mut self) -> Result<(), EngineError> {
        let n_adapters = self.adapters.as_ref().map_or(0, |a| a.all().len());
        for n_active in 0..=n_adapters.min(1) {
            let graph = self.with_active(n_active).graph(ONE)?;
            let (backend, weights, layout) = (&self.backend, &self.weights, &self.settings.layout);
            let key = ProgramKey::of(ONE, RowsOut::Whole, n_active);
            self.programs.get_or_compile(key, || {
                Ok::<_, EngineError>(backend.compile(&graph, weights, layout)?)
            })?;
        }
        Ok(())
    }

    fn with_active(&self, n_active: usize) -> Arc<dyn Model> {
        let model = self.model.with_active_adapters(n_active);
        model.unwrap_or_else(|| Arc::clone(&self.model))
    }

    /// The model with its control vector, for states.
    fn fingerprint(&self) -> Result<Fingerprint, EngineError> {
        let model = self.with_active(0);
        let encoder = self.model.source_encoder().map(|encoder| encoder.model);
        let head = self.head.as_ref().map(|head| Arc::clone(&head.model));
        let others = encoder.into_iter().chain(head);
        let others = others.map(|other| other.graph(ONE));
        let others = others.collect::<Result<Vec<_>, _>>()?;
        let n_vocab = self.settings.rules.n_vocab;
        let graph = model.graph(ONE)?;
        Ok(fingerprint_of(
            &*model,
            n_vocab,
            &graph,
            &others,
            &*self.source,
        ))
    }
}
