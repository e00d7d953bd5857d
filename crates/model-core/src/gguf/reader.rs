//! A little-endian reader over bytes in memory. Never reads beyond them, never allocates.
//!
//! Every method takes what is being read, for the message when it is not there; it is rendered
//! only then. Knows nothing of GGUF.

use std::fmt::Arguments;

use crate::error::GgufError;

/// Reads front to back.
#[derive(Clone, Debug)]
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    /// A reader at the start of `bytes`.
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Bytes read so far.
    pub(super) fn position(&self) -> u64 {
        self.at as u64
    }

    /// The bytes that are left.
    pub(super) fn rest(&self) -> &'a [u8] {
        self.bytes.get(self.at..).unwrap_or_default()
    }

    /// Bytes that are left.
    pub(super) fn remaining(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }

    /// The next `n` bytes.
    pub(super) fn take(&mut self, n: u64, part: Arguments<'_>) -> Result<&'a [u8], GgufError> {
        let taken = usize::try_from(n)
            .ok()
            .and_then(|n| self.at.checked_add(n))
            .and_then(|end| Some((end, self.bytes.get(self.at..end)?)));
        let Some((end, bytes)) = taken else {
            return Err(GgufError::Truncated {
                part: part.to_string(),
                at: self.position(),
                wanted: n,
                available: self.remaining(),
            });
        };
        self.at = end;
        Ok(bytes)
    }

    /// The next `N` bytes.
    pub(super) fn array<const N: usize>(
        &mut self,
        part: Arguments<'_>,
    ) -> Result<[u8; N], GgufError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64, part)?);
        Ok(array)
    }

    /// A 32-bit number.
    pub(super) fn u32(&mut self, part: Arguments<'_>) -> Result<u32, GgufError> {
        Ok(u32::from_le_bytes(self.array(part)?))
    }

    /// A 64-bit number.
    pub(super) fn u64(&mut self, part: Arguments<'_>) -> Result<u64, GgufError> {
        Ok(u64::from_le_bytes(self.array(part)?))
    }

    /// A 64-bit length and that many bytes, at most `at_most`.
    pub(super) fn text(
        &mut self,
        at_most: u64,
        part: Arguments<'_>,
    ) -> Result<&'a [u8], GgufError> {
        let length = self.u64(format_args!("the length of {part}"))?;
        if length > at_most {
            return Err(GgufError::TooLong {
                part: part.to_string(),
                length,
                at_most,
            });
        }
        self.take(length, part)
    }

    /// As [`Self::text`], and UTF-8.
    pub(super) fn utf8(&mut self, at_most: u64, part: Arguments<'_>) -> Result<&'a str, GgufError> {
        std::str::from_utf8(self.text(at_most, part)?).map_err(|error| GgufError::NotUtf8 {
            part: part.to_string(),
            valid: error.valid_up_to(),
        })
    }

    /// `count`, if that many things of at least `min_bytes` (not 0) each fit into what is left and
    /// `limit` allows them.
    pub(super) fn check_count(
        &self,
        count: u64,
        min_bytes: u64,
        limit: u64,
        part: Arguments<'_>,
    ) -> Result<usize, GgufError> {
        let at_most = self.remaining() / min_bytes;
        match usize::try_from(count) {
            Ok(n) if count <= limit.min(at_most) => Ok(n),
            Ok(_) if count <= at_most => Err(GgufError::OverLimit {
                part: part.to_string(),
                count,
                limit,
            }),
            _ => Err(GgufError::TooMany {
                part: part.to_string(),
                count,
                at_most,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_little_endian_and_stops_at_the_end() {
        let mut reader = Reader::new(&[1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 9]);
        assert_eq!(reader.u32(format_args!("a")), Ok(1));
        assert_eq!(reader.u64(format_args!("b")), Ok(2));
        let error = reader.u32(format_args!("the last number")).unwrap_err();
        assert_eq!(
            error.to_string(),
            "truncated in the last number at byte 12: 4 bytes wanted, 1 available"
        );
        assert_eq!(
            reader.take(1, format_args!("c")),
            Ok(&[9][..]),
            "a failed read takes nothing"
        );
    }

    #[test]
    fn lengths_that_overflow_are_truncations() {
        let mut reader = Reader::new(&[0; 16]);
        reader.take(3, format_args!("start")).unwrap();
        let error = reader.take(u64::MAX, format_args!("all")).unwrap_err();
        assert!(
            matches!(
                error,
                GgufError::Truncated {
                    wanted: u64::MAX,
                    available: 13,
                    ..
                }
            ),
            "{error:?}"
        );
    }

    #[test]
    fn counts_are_held_against_the_bytes_left() {
        let reader = Reader::new(&[0; 100]);
        let check = |count, limit| reader.check_count(count, 8, limit, format_args!("things"));
        assert_eq!(check(12, 1000), Ok(12));
        let too_many = |count, at_most| {
            Err(GgufError::TooMany {
                part: "things".to_owned(),
                count,
                at_most,
            })
        };
        assert_eq!(check(13, 1000), too_many(13, 12));
        assert_eq!(check(u64::MAX, u64::MAX), too_many(u64::MAX, 12));
        let over_limit = GgufError::OverLimit {
            part: "things".to_owned(),
            count: 6,
            limit: 5,
        };
        assert_eq!(check(6, 5), Err(over_limit));
    }

    #[test]
    fn text_has_a_limit_and_must_be_utf8() {
        let bytes = [2, 0, 0, 0, 0, 0, 0, 0, b'a', 0xff];
        assert_eq!(
            Reader::new(&bytes).text(2, format_args!("name")),
            Ok(&b"a\xff"[..])
        );
        assert!(matches!(
            Reader::new(&bytes).text(1, format_args!("name")),
            Err(GgufError::TooLong {
                length: 2,
                at_most: 1,
                ..
            })
        ));
        assert!(matches!(
            Reader::new(&bytes).utf8(2, format_args!("name")),
            Err(GgufError::NotUtf8 { valid: 1, .. })
        ));
    }
}
