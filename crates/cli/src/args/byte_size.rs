//! [`ByteSize`]: a number of bytes with a unit. Knows nothing of what it limits.

use std::str::FromStr;

/// A number of bytes: `8G`, `512M`, `1.5GiB`, `1000000`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ByteSize(pub(crate) u64);

/// The largest size: sums of several do not overflow.
const MOST: f64 = (1u64 << 56) as f64;

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.');
        let (number, unit) = text.split_at(end.unwrap_or(text.len()));
        let shift = match unit.trim().to_ascii_lowercase().trim_end_matches("ib") {
            "" | "b" => 0,
            "k" | "kb" => 10,
            "m" | "mb" => 20,
            "g" | "gb" => 30,
            "t" | "tb" => 40,
            _ => 64,
        };
        let number = number.parse::<f64>().ok().filter(|n| *n > 0.0);
        let n_bytes = number.filter(|_| shift < 64);
        let n_bytes = n_bytes.map(|number| number * (1u64 << shift) as f64);
        match n_bytes {
            Some(n_bytes) if n_bytes > MOST => Err("no machine has so many bytes".to_owned()),
            // A size that is no whole number of bytes is rounded down.
            Some(n_bytes) => Ok(Self(n_bytes as u64)),
            None => Err("a size above 0 is needed, as in 8G or 512M".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        let size = |text: &str| text.parse::<ByteSize>().map(|size| size.0);
        assert_eq!(size("1000"), Ok(1000));
        assert_eq!(size("8G"), Ok(8 << 30));
        assert_eq!(size("1.5MiB"), Ok(3 << 19));
        assert_eq!(size("2kb"), Ok(2048));
        for wrong in ["", "0", "G", "8X", "-1", "1e3", "99999999T"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
    }
}
