//! The decode loop, sampler and sessions of Cellar
