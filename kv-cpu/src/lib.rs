//! The CPU backend of Cellar: own kernels, a thread team, one arena
