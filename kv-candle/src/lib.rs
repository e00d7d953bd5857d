//! The reference backend of Cellar: any graph with plain candle operations
