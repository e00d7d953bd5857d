//! The contract suite on the CPU device.

use kv_candle::CandleBackend;
use kv_contract::Subject;

kv_contract::backend_contract!(|| Subject::new(CandleBackend::cpu()));
