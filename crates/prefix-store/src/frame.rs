//! [`Group`]: the bytes of a group in a sealed frame.
//!
//! ```text
//! header   magic[8] version:u32 zero:u32 n_bytes:u64 name[32] crc:u32 zero:u32
//! payload  n_bytes
//! seal     HMAC-SHA-256(seal key, header ‖ payload)
//! ```
//!
//! Numbers are little-endian; the CRC-32 is that of the payload. It tells accidents from forgeries;
//! only the seal is trusted. Invariant: a [`Group`] was sealed with its key under its name, so
//! nobody parses what others made. Knows nothing of what is in a payload.

use std::fmt;
use std::sync::Arc;

use hmac::Mac;

use crate::error::StoreError;
use crate::key::{GroupName, StoreKey};

const MAGIC: [u8; 8] = *b"\x89CELGRP\n";
const VERSION: u32 = 1;
const HEADER: usize = 64;
const SEAL: usize = 32;

/// The most bytes of a payload: 256 tokens of the largest models take a third of it.
pub const MAX_PAYLOAD: u64 = 1 << 28;

/// The most bytes of a frame.
pub(crate) const MAX_FRAME: u64 = MAX_PAYLOAD + (HEADER + SEAL) as u64;

/// A group whose frame is whole, sealed and of its name. Clones share the bytes.
#[derive(Clone, PartialEq, Eq)]
pub struct Group {
    frame: Arc<[u8]>,
}

/// A payload and what makes it a frame, without a copy of it.
#[derive(Clone, Copy)]
pub struct SealedPayload<'a> {
    header: [u8; HEADER],
    payload: &'a [u8],
    seal: [u8; SEAL],
}

/// What is wrong with the frame of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameFault {
    /// It is no frame.
    Foreign,
    /// Another version wrote it.
    Version(u32),
    /// Its end is missing, or something comes after it.
    Length {
        /// The bytes that it should have.
        wanted: u64,
        /// The bytes that are there.
        found: u64,
    },
    /// Bytes changed by accident.
    Damaged,
    /// It is the frame of another group.
    OtherName(GroupName),
    /// It was not sealed with this key.
    Forged,
}

impl fmt::Display for FrameFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Foreign => f.write_str("it is no group"),
            Self::Version(version) => {
                write!(f, "its format is version {version}, this is {VERSION}")
            }
            Self::Length { wanted, found } => {
                write!(f, "it should have {wanted} bytes and has {found}")
            }
            Self::Damaged => f.write_str("it is damaged"),
            Self::OtherName(name) => write!(f, "it is the group {name}"),
            Self::Forged => f.write_str("it was not sealed with this key"),
        }
    }
}

impl Group {
    /// Seals a payload under its name.
    ///
    /// # Errors
    /// [`StoreError::TooLarge`].
    pub fn seal(key: &StoreKey, name: GroupName, payload: &[u8]) -> Result<Self, StoreError> {
        let frame = SealedPayload::new(key, name, payload)?.parts().concat();
        let frame = frame.into();
        Ok(Self { frame })
    }

    /// Opens a frame that was found under a name. A copy is not made.
    ///
    /// # Errors
    /// [`StoreError::Refused`].
    pub fn open(key: &StoreKey, name: GroupName, frame: Arc<[u8]>) -> Result<Self, StoreError> {
        match check(key, name, &frame) {
            Ok(()) => Ok(Self { frame }),
            Err(fault) => Err(StoreError::Refused { name, fault }),
        }
    }

    /// What was sealed.
    pub fn payload(&self) -> &[u8] {
        let end = self.frame.len() - SEAL;
        self.frame.get(HEADER..end).unwrap_or_default()
    }

    /// The bytes that a store keeps.
    pub fn frame(&self) -> &Arc<[u8]> {
        &self.frame
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Group({} bytes)", self.payload().len())
    }
}

impl<'a> SealedPayload<'a> {
    /// Seals a payload under its name.
    ///
    /// # Errors
    /// [`StoreError::TooLarge`].
    pub fn new(key: &StoreKey, name: GroupName, payload: &'a [u8]) -> Result<Self, StoreError> {
        let n_bytes = payload.len() as u64;
        if n_bytes > MAX_PAYLOAD {
            let max = MAX_PAYLOAD;
            return Err(StoreError::TooLarge { n_bytes, max });
        }
        let mut header = [0; HEADER];
        let fields: [&[u8]; 7] = [
            &MAGIC,
            &VERSION.to_le_bytes(),
            &[0; 4],
            &n_bytes.to_le_bytes(),
            &name.0,
            &crc32fast::hash(payload).to_le_bytes(),
            &[0; 4],
        ];
        let bytes = fields.iter().copied().flatten();
        header
            .iter_mut()
            .zip(bytes)
            .for_each(|(to, from)| *to = *from);
        let mut seal = key.seals.clone();
        seal.update(&header);
        seal.update(payload);
        let seal = seal.finalize().into_bytes().into();
        Ok(Self {
            header,
            payload,
            seal,
        })
    }

    /// The frame, in order.
    pub fn parts(&self) -> [&[u8]; 3] {
        [&self.header, self.payload, &self.seal]
    }

    /// Bytes of the frame.
    pub fn n_bytes(&self) -> u64 {
        (HEADER + self.payload.len() + SEAL) as u64
    }
}

impl fmt::Debug for SealedPayload<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SealedPayload({} bytes)", self.payload.len())
    }
}

/// Fields of a header, in order.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn bytes<const N: usize>(&mut self) -> Option<&'a [u8; N]> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(first)
    }

    fn u32(&mut self) -> Option<u32> {
        self.bytes().map(|bytes| u32::from_le_bytes(*bytes))
    }
}

fn check(key: &StoreKey, name: GroupName, frame: &[u8]) -> Result<(), FrameFault> {
    let mut fields = Fields(frame);
    if fields.bytes() != Some(&MAGIC) {
        return Err(FrameFault::Foreign);
    }
    let too_short = || FrameFault::Length {
        wanted: (HEADER + SEAL) as u64,
        found: frame.len() as u64,
    };
    match fields.u32() {
        Some(VERSION) => {}
        Some(other) => return Err(FrameFault::Version(other)),
        None => return Err(too_short()),
    }
    let mut rest = || {
        let _zero = fields.u32()?;
        let n_bytes = u64::from_le_bytes(*fields.bytes()?);
        let named = GroupName(*fields.bytes()?);
        let crc = fields.u32()?;
        let _zero = fields.u32()?;
        Some((n_bytes, named, crc))
    };
    let (n_bytes, named, crc) = rest().ok_or_else(too_short)?;
    let wanted = n_bytes.saturating_add((HEADER + SEAL) as u64);
    let found = frame.len() as u64;
    let Some((sealed, seal)) = frame.split_last_chunk::<SEAL>().filter(|_| wanted == found) else {
        return Err(FrameFault::Length { wanted, found });
    };
    if crc32fast::hash(sealed.get(HEADER..).unwrap_or_default()) != crc {
        return Err(FrameFault::Damaged);
    }
    if named != name {
        return Err(FrameFault::OtherName(named));
    }
    let mut mac = key.seals.clone();
    mac.update(sealed);
    // Compares in constant time.
    mac.verify_slice(seal).map_err(|_| FrameFault::Forged)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::MIN_SECRET;

    fn key(byte: u8) -> StoreKey {
        StoreKey::new(&[byte; MIN_SECRET]).unwrap()
    }

    const NAME: GroupName = GroupName([3; 32]);

    fn fault(key: &StoreKey, name: GroupName, frame: &[u8]) -> Option<FrameFault> {
        match Group::open(key, name, frame.into()) {
            Ok(_) => None,
            Err(StoreError::Refused { fault, .. }) => Some(fault),
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn what_was_sealed_comes_out() {
        for payload in [&b""[..], b"rows", &[7; 100_000]] {
            let sealed = Group::seal(&key(1), NAME, payload).unwrap();
            let opened = Group::open(&key(1), NAME, sealed.frame().clone()).unwrap();
            assert_eq!(opened.payload(), payload);
        }
    }

    /// Each flipped bit, each cut, and what comes after the end.
    #[test]
    fn no_other_bytes_are_opened() {
        let sealed = Group::seal(&key(1), NAME, b"some rows").unwrap();
        let good = sealed.frame().to_vec();
        for at in 0..good.len() {
            for bit in 0..8 {
                let mut frame = good.clone();
                frame[at] ^= 1 << bit;
                assert!(
                    fault(&key(1), NAME, &frame).is_some(),
                    "byte {at}, bit {bit}"
                );
            }
            assert!(fault(&key(1), NAME, &good[..at]).is_some(), "{at} bytes");
        }
        let longer = [&good[..], &[0]].concat();
        let (wanted, found) = (good.len() as u64, longer.len() as u64);
        let too_long = FrameFault::Length { wanted, found };
        assert_eq!(fault(&key(1), NAME, &longer), Some(too_long));
    }

    #[test]
    fn faults_are_told_apart() {
        let sealed = Group::seal(&key(1), NAME, b"rows").unwrap();
        let good = sealed.frame().to_vec();
        assert_eq!(fault(&key(2), NAME, &good), Some(FrameFault::Forged));
        let other = GroupName([4; 32]);
        assert_eq!(
            fault(&key(1), other, &good),
            Some(FrameFault::OtherName(NAME))
        );
        let mut older = good.clone();
        older[8] = 0;
        assert_eq!(fault(&key(1), NAME, &older), Some(FrameFault::Version(0)));
        let mut damaged = good.clone();
        damaged[HEADER] ^= 1;
        assert_eq!(fault(&key(1), NAME, &damaged), Some(FrameFault::Damaged));
        assert_eq!(
            fault(&key(1), NAME, b"\x89KVSTATE"),
            Some(FrameFault::Foreign)
        );
        // A length that lies takes no memory.
        let mut long = good;
        long[16..24].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(matches!(
            fault(&key(1), NAME, &long),
            Some(FrameFault::Length {
                wanted: u64::MAX,
                ..
            })
        ));
    }
}
