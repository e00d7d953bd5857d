//! [`WavFile`]: the chunks of a WAV file, and its samples.
//!
//! Of this format little is needed, and its lengths are a stranger's: each is compared with the
//! bytes that are there. Invariant: a file that ends before its header says so is refused. Knows no
//! rate but the file's.

use model_core::picture::PictureError;

use super::{check_channels, check_length, check_rate, cut_short, unreadable};

/// The kinds of samples: whole numbers, floats, and what says in its own part which of both.
const WHOLE: u16 = 1;
const FLOAT: u16 = 3;
const EXTENSIBLE: u16 = 0xfffe;

/// The samples of a file, of all channels in turn.
struct Form {
    kind: u16,
    n_channels: usize,
    rate: u32,
    /// Bytes of a sample.
    width: usize,
}

/// A file, and what its header says.
pub(super) struct WavFile<'a> {
    form: Form,
    data: &'a [u8],
}

impl<'a> WavFile<'a> {
    /// The file in these bytes, of at most so many seconds.
    ///
    /// # Errors
    /// [`PictureError`] naming what is wrong.
    pub(super) fn new(bytes: &'a [u8], most_seconds: u32) -> Result<Self, PictureError> {
        let mut rest = bytes.get(12..).unwrap_or_default();
        let mut form = None;
        loop {
            let Some((header, behind)) = rest.split_first_chunk::<8>() else {
                return Err(unreadable("it has no samples: the chunk 'data' is missing"));
            };
            let [name @ .., a, b, c, d] = header;
            let stated = u32::from_le_bytes([*a, *b, *c, *d]);
            let length = (stated as usize).min(behind.len());
            match name {
                b"fmt " => form = Some(Form::read(&behind[..length])?),
                b"data" => {
                    let form = form
                        .ok_or_else(|| unreadable("the chunk 'fmt ' is not before its samples"))?;
                    // What is written while it is recorded does not know its end.
                    let is_open = stated == 0 || stated == u32::MAX;
                    let data = if is_open { behind } else { &behind[..length] };
                    let stated = if is_open {
                        data.len() as u64
                    } else {
                        u64::from(stated)
                    };
                    let frame = form.frame() as u64;
                    check_length(stated / frame, form.rate, most_seconds)?;
                    let (there, wanted) = (data.len() as u64 / frame, stated / frame);
                    if there < wanted {
                        return Err(cut_short(there, wanted));
                    }
                    return Ok(Self { form, data });
                }
                _ => {}
            }
            // Chunks begin at even places.
            let next = length + length % 2;
            rest = behind.get(next..).unwrap_or_default();
        }
    }

    /// Samples of a second.
    pub(super) fn rate(&self) -> u32 {
        self.form.rate
    }

    /// The samples, channels mixed.
    pub(super) fn mixed(&self) -> Vec<f32> {
        let Form {
            kind,
            width,
            n_channels,
            ..
        } = self.form;
        let frames = self.data.chunks_exact(self.form.frame());
        let sample = |bytes: &[u8]| value(kind, bytes);
        let mixed = |frame: &[u8]| frame.chunks_exact(width).map(sample).sum::<f32>();
        frames
            .map(|frame| mixed(frame) / n_channels as f32)
            .collect()
    }
}

impl Form {
    fn read(chunk: &[u8]) -> Result<Self, PictureError> {
        let word = |at: usize| -> Result<u16, PictureError> {
            let bytes = chunk
                .get(at..at + 2)
                .and_then(|bytes| bytes.try_into().ok());
            bytes.map(u16::from_le_bytes).ok_or_else(|| {
                unreadable(format!(
                    "the chunk 'fmt ' has {} bytes: 16 are needed",
                    chunk.len()
                ))
            })
        };
        let mut kind = word(0)?;
        if kind == EXTENSIBLE {
            kind = word(24)?;
        }
        let n_channels = usize::from(word(2)?);
        check_channels(n_channels)?;
        let rate = u32::from(word(4)?) | u32::from(word(6)?) << 16;
        check_rate(rate)?;
        let bits = word(14)?;
        match (kind, bits) {
            (WHOLE, 8 | 16 | 24 | 32) | (FLOAT, 32 | 64) => {}
            _ => {
                let reason = format!(
                    "its samples are of kind {kind} with {bits} bits: whole numbers of 8, 16, 24 and 32 bits \
                     are taken, and floats of 32 and 64"
                );
                return Err(unreadable(reason));
            }
        }
        Ok(Self {
            kind,
            n_channels,
            rate,
            width: usize::from(bits / 8),
        })
    }

    /// Bytes of the samples of all channels; at least 1.
    fn frame(&self) -> usize {
        self.width * self.n_channels
    }
}

/// A sample, from -1 to 1.
fn value(kind: u16, bytes: &[u8]) -> f32 {
    match (kind, bytes) {
        (FLOAT, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
        (FLOAT, &[a, b, c, d, e, f, g, h]) => f64::from_le_bytes([a, b, c, d, e, f, g, h]) as f32,
        // Of 8 bits they have no sign.
        (_, &[a]) => (f32::from(a) - 128.0) / 128.0,
        _ => {
            let mut whole = [0; 4];
            let start = 4usize.saturating_sub(bytes.len());
            whole
                .iter_mut()
                .skip(start)
                .zip(bytes)
                .for_each(|(to, byte)| *to = *byte);
            i32::from_le_bytes(whole) as f32 / 2_147_483_648.0
        }
    }
}
