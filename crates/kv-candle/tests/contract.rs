//! The contract suite on the CPU device.

use kv_candle::CandleBackend;
use kv_core::contract::Subject;

kv_core::backend_contract!(|| Subject::new(CandleBackend::cpu()));
