//! [`BinaryUnits`]: sizes for people. Knows nothing of what has them.

use std::fmt;

/// A number of bytes that is printed in binary units: `1.50 GiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BinaryUnits(pub u64);

impl fmt::Display for BinaryUnits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut value = self.0 as f64;
        let mut unit = None;
        for next in ["KiB", "MiB", "GiB", "TiB", "PiB"] {
            if value < 1024.0 {
                break;
            }
            (value, unit) = (value / 1024.0, Some(next));
        }
        match unit {
            None => write!(f, "{} bytes", self.0),
            Some(unit) => write!(f, "{value:.2} {unit}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_readable() {
        let readable = |n| BinaryUnits(n).to_string();
        assert_eq!(readable(1023), "1023 bytes");
        assert_eq!(readable(1536), "1.50 KiB");
        assert_eq!(readable(3 << 29), "1.50 GiB");
        assert_eq!(readable(3 << 30), "3.00 GiB");
        assert_eq!(readable(1 << 42), "4.00 TiB");
    }
}
