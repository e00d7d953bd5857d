//! The frame of a state: a header, then sections, each with its name, length and checksums.
//!
//! ```text
//! header    magic[8] version:u32 n_sections:u32 n_bytes:u64 checksum:u64
//! section   tag[4] flags:u32 len:u64 checksum:u64 | payload[len] | checksum:u64
//! ```
//!
//! All numbers are little-endian; checksums are XXH64, seeded with the number of the section, so
//! that sections cannot change places. Invariant: a length is believed only after its checksum was
//! right and where so many bytes are there. Knows nothing of what sections hold.

use std::io::{self, Write};

use super::VERSION;
use super::error::StateError;
use super::xxh64::{Xxh64, xxh64};

pub(super) const MAGIC: [u8; 8] = *b"\x89KVSTATE";
const HEADER: usize = 32;
const SECTION: usize = 24;
const CHECKSUM: usize = 8;

/// A reader that does not know the section must refuse the state.
const REQUIRED: u32 = 1;

/// The kind of a section.
pub(super) type Tag = [u8; 4];

pub(super) fn tag_name(tag: Tag) -> String {
    tag.escape_ascii().to_string()
}

/// Bytes that sections with such payloads take, the header included; `None` beyond all counting.
pub(super) fn total(payloads: impl IntoIterator<Item = u64>) -> Option<u64> {
    let frame = (SECTION + CHECKSUM) as u64;
    let mut sizes = payloads.into_iter();
    sizes.try_fold(HEADER as u64, |all, len| {
        all.checked_add(len)?.checked_add(frame)
    })
}

/// Writes a state section by section.
pub(super) struct FrameWriter<'w> {
    out: &'w mut dyn Write,
    /// Number of the next section.
    number: u64,
}

impl<'w> FrameWriter<'w> {
    /// Begins a state of so many sections and bytes in all.
    pub(super) fn new(out: &'w mut dyn Write, n_sections: u32, n_bytes: u64) -> io::Result<Self> {
        let mut header = [0; HEADER];
        let (fields, checksum) = header.split_at_mut(HEADER - CHECKSUM);
        fields[..8].copy_from_slice(&MAGIC);
        fields[8..12].copy_from_slice(&VERSION.to_le_bytes());
        fields[12..16].copy_from_slice(&n_sections.to_le_bytes());
        fields[16..24].copy_from_slice(&n_bytes.to_le_bytes());
        checksum.copy_from_slice(&xxh64(fields, 0).to_le_bytes());
        out.write_all(&header)?;
        Ok(Self { out, number: 0 })
    }

    /// Writes a whole section.
    pub(super) fn section(&mut self, tag: Tag, payload: &[u8]) -> io::Result<()> {
        let mut section = self.begin(tag, payload.len() as u64)?;
        section.write(payload)?;
        section.end()
    }

    /// Begins a section whose payload comes in pieces, `len` bytes in all.
    pub(super) fn begin(&mut self, tag: Tag, len: u64) -> io::Result<SectionWriter<'_>> {
        let mut header = [0; SECTION];
        let (fields, checksum) = header.split_at_mut(SECTION - CHECKSUM);
        fields[..4].copy_from_slice(&tag);
        fields[4..8].copy_from_slice(&REQUIRED.to_le_bytes());
        fields[8..16].copy_from_slice(&len.to_le_bytes());
        checksum.copy_from_slice(&xxh64(fields, self.number).to_le_bytes());
        self.out.write_all(&header)?;
        let hash = Xxh64::new(self.number);
        self.number += 1;
        Ok(SectionWriter {
            out: &mut *self.out,
            hash,
            n_left: len,
        })
    }
}

/// A section under way.
pub(super) struct SectionWriter<'w> {
    out: &'w mut dyn Write,
    hash: Xxh64,
    n_left: u64,
}

impl SectionWriter<'_> {
    pub(super) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let left = self.n_left.checked_sub(bytes.len() as u64);
        self.n_left = left.ok_or_else(|| io::Error::other("a section is longer than announced"))?;
        self.hash.update(bytes);
        self.out.write_all(bytes)
    }

    pub(super) fn end(self) -> io::Result<()> {
        if self.n_left != 0 {
            return Err(io::Error::other("a section is shorter than announced"));
        }
        self.out.write_all(&self.hash.finish().to_le_bytes())
    }
}

/// A section that was read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Section<'a> {
    pub(super) tag: Tag,
    pub(super) payload: &'a [u8],
    required: bool,
}

impl Section<'_> {
    /// True if a reader that does not know it may leave it out.
    pub(super) fn may_be_skipped(&self) -> bool {
        !self.required
    }
}

/// Checks the frame of a state and every checksum in it, and gives its version and its sections.
pub(super) fn read(bytes: &[u8]) -> Result<(u32, Vec<Section<'_>>), StateError> {
    let got = bytes.len() as u64;
    let begins = bytes.iter().zip(&MAGIC).all(|(a, b)| a == b);
    if !begins || bytes.is_empty() {
        return Err(StateError::NotAState);
    }
    let (wanted, mut at) = (HEADER as u64, 0);
    let header = take(bytes, &mut at, HEADER).ok_or(StateError::Truncated { wanted, got })?;
    check(header, 0, || ("the header".to_owned(), 0))?;
    let version = u32_at(header, 8);
    if version == 0 || version > VERSION {
        return Err(StateError::Version {
            found: version,
            known: VERSION,
        });
    }
    let (n_sections, end) = (u32_at(header, 12), u64_at(header, 16));
    if end > got {
        return Err(StateError::Truncated { wanted: end, got });
    }
    if end < got {
        return Err(StateError::Trailing { end, got });
    }
    let mut sections = Vec::new();
    for number in 0..u64::from(n_sections) {
        sections.push(section(bytes, &mut at, number)?);
    }
    match at as u64 {
        end if end == got => Ok((version, sections)),
        end => Err(StateError::Trailing { end, got }),
    }
}

fn section<'a>(bytes: &'a [u8], at: &mut usize, number: u64) -> Result<Section<'a>, StateError> {
    let got = bytes.len() as u64;
    let start = *at as u64;
    let cut = |n: u64| StateError::Truncated {
        wanted: start.saturating_add(n),
        got,
    };
    let header = take(bytes, at, SECTION).ok_or_else(|| cut(SECTION as u64))?;
    check(header, number, || {
        (format!("the header of section {number}"), start)
    })?;
    let mut tag = [0; 4];
    tag.copy_from_slice(&header[..4]);
    let (flags, len) = (u32_at(header, 4), u64_at(header, 8));
    let with_checksum = len.checked_add(CHECKSUM as u64);
    let framed = with_checksum
        .and_then(|n| usize::try_from(n).ok())
        .and_then(|n| take(bytes, at, n))
        .ok_or_else(|| cut((SECTION + CHECKSUM) as u64 + len.min(u64::MAX / 2)))?;
    check(framed, number, || {
        let what = format!("section {number} '{}'", tag_name(tag));
        (what, start + SECTION as u64)
    })?;
    Ok(Section {
        tag,
        payload: &framed[..framed.len() - CHECKSUM],
        required: flags & REQUIRED != 0,
    })
}

/// Checks that the last bytes are the checksum of those before them.
fn check(
    bytes: &[u8],
    seed: u64,
    describe: impl FnOnce() -> (String, u64),
) -> Result<(), StateError> {
    let (fields, checksum) = bytes.split_at(bytes.len().saturating_sub(CHECKSUM));
    let (wanted, got) = (u64_at(checksum, 0), xxh64(fields, seed));
    if wanted == got {
        return Ok(());
    }
    let (what, at) = describe();
    Err(StateError::Checksum {
        what,
        at,
        wanted,
        got,
    })
}

/// The next `n` bytes, or `None` where there are fewer.
fn take<'a>(bytes: &'a [u8], at: &mut usize, n: usize) -> Option<&'a [u8]> {
    let end = at.checked_add(n)?;
    let taken = bytes.get(*at..end)?;
    *at = end;
    Some(taken)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let own = bytes.get(at..).and_then(|b| b.first_chunk::<4>());
    own.map_or(0, |b| u32::from_le_bytes(*b))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let own = bytes.get(at..).and_then(|b| b.first_chunk::<8>());
    own.map_or(0, |b| u64::from_le_bytes(*b))
}
