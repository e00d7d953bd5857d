//! Chains: samplers one after the other.
//!
//! Invariant: a chain owns its samplers and frees them with itself. None of them runs while the
//! list is locked, so that one of the program's may ask for it.

use std::ffi::{c_char, c_void};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::abi::{ChainParams, SamplerPerf, TokenDataArray};
use crate::ffi::{Handle, Out, c_api, count, guarded};
use crate::log;
use crate::sampler::{self, Interface, Sampler};

/// The target of a chain's pointer.
struct Chain(Mutex<Links>);

struct Links {
    samplers: Vec<Handle<Sampler>>,
    params: ChainParams,
    took: Duration,
    n_accepted: i32,
}

static CHAIN: Interface = Interface {
    name: Some(name),
    accept: Some(accept),
    apply: Some(apply),
    reset: Some(reset),
    clone: Some(clone),
    free: Some(free),
    backend_init: std::ptr::null(),
    backend_accept: std::ptr::null(),
    backend_apply: std::ptr::null(),
    backend_set_input: std::ptr::null(),
    backend_reset: std::ptr::null(),
    copy_state: None,
};

impl Chain {
    fn of<'a>(handle: Handle<Sampler>) -> Option<&'a Self> {
        let sampler = handle.get()?;
        if !std::ptr::eq(sampler.iface, &raw const CHAIN) {
            return None;
        }
        Handle::<Self>::of(sampler.ctx.get().cast()).get()
    }

    fn with<R>(&self, work: impl FnOnce(&mut Links) -> R) -> R {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn samplers(&self) -> Vec<Handle<Sampler>> {
        self.with(|links| links.samplers.clone())
    }

    /// Does something with each sampler, and adds the time that it took.
    fn timed(&self, mut each: impl FnMut(Handle<Sampler>)) {
        let began = Instant::now();
        self.samplers().into_iter().for_each(&mut each);
        self.with(|links| links.took += began.elapsed());
    }
}

/// A chain, or a line.
fn chain<'a>(name: &str, handle: Handle<Sampler>) -> Option<&'a Chain> {
    let found = Chain::of(handle);
    if found.is_none() {
        log::error(&format!("{name}: this is no chain of samplers"));
    }
    found
}

/// The seed of the last sampler of a chain that draws.
pub(super) fn seed(handle: Handle<Sampler>) -> Option<u32> {
    let samplers = Chain::of(handle)?.samplers();
    let of = |&handle: &Handle<Sampler>| {
        let own = sampler::Own::of(handle).and_then(sampler::Own::seed);
        own.or_else(|| seed(handle))
    };
    samplers.iter().rev().find_map(of)
}

fn new(params: ChainParams) -> Handle<Sampler> {
    let chain = Handle::new(Chain(Mutex::new(Links {
        samplers: Vec::new(),
        params,
        took: Duration::ZERO,
        n_accepted: 0,
    })));
    Sampler::new(&raw const CHAIN, chain.as_ptr().cast::<c_void>())
}

fn perf(name: &str, handle: Handle<Sampler>) -> SamplerPerf {
    let chain = chain(name, handle);
    chain.map_or_else(SamplerPerf::default, |chain| {
        chain.with(|links| SamplerPerf {
            t_sample_ms: links.took.as_secs_f64() * 1e3,
            n_sample: links.n_accepted,
        })
    })
}

extern "C" fn name(_handle: Handle<Sampler>) -> *const c_char {
    c"chain".as_ptr()
}

extern "C" fn accept(handle: Handle<Sampler>, token: i32) {
    guarded("llama_sampler_accept", (), || {
        if let Some(chain) = Chain::of(handle) {
            chain.timed(|sampler| sampler::accept(sampler, token));
            chain.with(|links| links.n_accepted = links.n_accepted.saturating_add(1));
        }
    });
}

extern "C" fn apply(handle: Handle<Sampler>, array: Out<TokenDataArray>) {
    guarded("llama_sampler_apply", (), || {
        if let Some(chain) = Chain::of(handle) {
            chain.timed(|sampler| sampler::apply(sampler, array));
        }
    });
}

extern "C" fn reset(handle: Handle<Sampler>) {
    guarded("llama_sampler_reset", (), || {
        if let Some(chain) = Chain::of(handle) {
            chain.samplers().into_iter().for_each(sampler::reset);
        }
    });
}

extern "C" fn clone(handle: Handle<Sampler>) -> Handle<Sampler> {
    guarded("llama_sampler_clone", Handle::NULL, || {
        let Some(chain) = Chain::of(handle) else {
            return Handle::NULL;
        };
        let copy = new(chain.with(|links| links.params));
        let samplers: Vec<_> = chain.samplers().into_iter().map(sampler::clone).collect();
        if let Some(copy) = Chain::of(copy) {
            copy.with(|links| links.samplers = samplers);
        }
        copy
    })
}

extern "C" fn free(handle: Handle<Sampler>) {
    guarded("llama_sampler_free", (), || {
        if let Some(chain) = Chain::of(handle) {
            chain.samplers().into_iter().for_each(sampler::free);
        }
        if let Some(sampler) = handle.get() {
            Handle::<Chain>::of(sampler.ctx.get().cast()).take();
        }
    });
}

c_api! {
    fn llama_sampler_chain_init(params: ChainParams) -> Handle<Sampler> = Handle::NULL; {
        new(params)
    }

    fn llama_sampler_chain_add(handle: Handle<Sampler>, added: Handle<Sampler>); {
        let name = "llama_sampler_chain_add";
        let Some(chain) = chain(name, handle) else {
            return;
        };
        if added.get().is_none() || added == handle {
            log::error(&format!("{name}: there is no such sampler to be added"));
            return;
        }
        chain.with(|links| links.samplers.push(added));
    }

    fn llama_sampler_chain_get(handle: Handle<Sampler>, index: i32)
        -> Handle<Sampler> = Handle::NULL; {
        match Chain::of(handle) {
            None => Handle::NULL,
            Some(_) if index == -1 => handle,
            Some(chain) => {
                let index = usize::try_from(index).ok();
                let found = index.and_then(|index| chain.samplers().get(index).copied());
                found.unwrap_or(Handle::NULL)
            }
        }
    }

    fn llama_sampler_chain_n(handle: Handle<Sampler>) -> i32 = 0; {
        chain("llama_sampler_chain_n", handle).map_or(0, |chain| count(chain.samplers().len()))
    }

    fn llama_sampler_chain_remove(handle: Handle<Sampler>, index: i32)
        -> Handle<Sampler> = Handle::NULL; {
        let Some(chain) = chain("llama_sampler_chain_remove", handle) else {
            return Handle::NULL;
        };
        chain.with(|links| match usize::try_from(index) {
            Ok(index) if index < links.samplers.len() => links.samplers.remove(index),
            _ => Handle::NULL,
        })
    }

    fn llama_perf_sampler(handle: Handle<Sampler>) -> SamplerPerf = SamplerPerf::default(); {
        perf("llama_perf_sampler", handle)
    }

    fn llama_perf_sampler_print(handle: Handle<Sampler>); {
        let name = "llama_perf_sampler_print";
        let SamplerPerf { t_sample_ms, n_sample } = perf(name, handle);
        log::info(&format!("sampling:   {t_sample_ms:.2} ms for {n_sample} tokens"));
    }

    fn llama_perf_sampler_reset(handle: Handle<Sampler>); {
        if let Some(chain) = chain("llama_perf_sampler_reset", handle) {
            chain.with(|links| {
                links.took = Duration::ZERO;
                links.n_accepted = 0;
            });
        }
    }
}
