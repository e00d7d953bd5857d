//! [`Sound`]: from the bytes of a file to samples of one channel.
//!
//! Invariant: bytes and seconds are bounded before and while a file is decoded, and a file that
//! ends before its header says so is refused. Knows no model.

mod mel;
mod prepare;
mod rate;
mod wav;

use std::io::{Cursor, ErrorKind};

use model_core::media::MediaKind;
use model_core::picture::PictureError;
use symphonia::core::codecs::CodecParameters;
use symphonia::core::codecs::audio::AudioDecoderOptions;
use symphonia::core::codecs::audio::well_known::CODEC_ID_MP3;
use symphonia::core::errors::Error as CodecError;
use symphonia::core::formats::probe::Hint;
use symphonia::core::formats::{FormatOptions, TrackType};
use symphonia::core::io::MediaSourceStream;
use symphonia::core::meta::MetadataOptions;

pub(crate) use mel::{FRAME, HOP, N_POWERS, SAMPLE_RATE};
pub(crate) use prepare::SoundPreparation;
use wav::WavFile;

use crate::pixels::MAX_BYTES;

/// The rates of samples that are taken, the lowest and the highest.
const RATES: [u32; 2] = [1000, 384_000];

/// The most channels that are mixed.
const MAX_CHANNELS: usize = 64;

/// A sound of one channel, from -1 to 1, [`SAMPLE_RATE`] samples of a second.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sound {
    pub(crate) samples: Vec<f32>,
}

impl Sound {
    /// Samples of one channel at this rate, of at most so many seconds.
    ///
    /// # Errors
    /// [`PictureError`] where the rate is none that is taken, a sample is no number, or there are
    /// too many.
    pub(crate) fn new(rate: u32, samples: &[f32], most_seconds: u32) -> Result<Self, PictureError> {
        check_rate(rate)?;
        check_length(samples.len() as u64, rate, most_seconds)?;
        if let Some(at) = samples.iter().position(|sample| !sample.is_finite()) {
            return Err(unreadable(format!("sample {at} is {}", samples[at])));
        }
        let samples = if rate == SAMPLE_RATE {
            samples.to_vec()
        } else {
            rate::resampled(samples, rate, SAMPLE_RATE)
        };
        Ok(Self { samples })
    }

    /// Decodes a file: WAV, MP3 or FLAC, of at most so many seconds. Channels are mixed.
    ///
    /// # Errors
    /// [`PictureError`].
    pub(crate) fn decode(bytes: &[u8], most_seconds: u32) -> Result<Self, PictureError> {
        if bytes.len() > MAX_BYTES {
            return Err(PictureError::TooLarge {
                media: MediaKind::Sound,
                got: bytes.len() as u64,
                unit: "bytes",
                limit: MAX_BYTES as u64,
            });
        }
        if bytes.is_empty() {
            return Err(unreadable("there are no bytes"));
        }
        if bytes.starts_with(b"RIFF") && bytes.get(8..12) == Some(b"WAVE") {
            let file = WavFile::new(bytes, most_seconds)?;
            return Self::new(file.rate(), &file.mixed(), most_seconds);
        }
        if !is_known(bytes) {
            return Err(unreadable("it is none of WAV, MP3 and FLAC"));
        }
        let (rate, samples) = decoded(bytes, most_seconds)?;
        Self::new(rate, &samples, most_seconds)
    }
}

/// The rate and the mixed samples of an MP3 or FLAC file.
fn decoded(bytes: &[u8], most_seconds: u32) -> Result<(u32, Vec<f32>), PictureError> {
    let source = MediaSourceStream::new(Box::new(Cursor::new(bytes)), Default::default());
    let probe = symphonia::default::get_probe();
    let (format, metadata) = (FormatOptions::default(), MetadataOptions::default());
    let mut format = probe
        .probe(&Hint::new(), source, format, metadata)
        .map_err(unreadable)?;
    let track = format.default_track(TrackType::Audio);
    let track = track.ok_or_else(|| unreadable("it has no audio"))?.clone();
    let Some(CodecParameters::Audio(codec)) = &track.codec_params else {
        return Err(unreadable("it has no audio"));
    };
    let rate = codec.sample_rate.unwrap_or(0);
    check_rate(rate)?;
    // The header of an MP3 file does not say it: its reader guesses.
    let stated = track.num_frames.filter(|_| codec.codec != CODEC_ID_MP3);
    check_length(stated.unwrap_or(0), rate, most_seconds)?;
    let codecs = symphonia::default::get_codecs();
    let decoder = codecs.make_audio_decoder(codec, &AudioDecoderOptions::default());
    let mut decoder = decoder.map_err(unreadable)?;
    let (mut samples, mut packet_samples) = (Vec::new(), Vec::new());
    loop {
        let packet = match format.next_packet() {
            Ok(Some(packet)) => packet,
            Ok(None) => break,
            Err(CodecError::IoError(error)) if error.kind() == ErrorKind::UnexpectedEof => break,
            Err(error) => return Err(unreadable(error)),
        };
        if packet.track_id != track.id {
            continue;
        }
        let decoded = decoder.decode(&packet).map_err(unreadable)?;
        if decoded.spec().rate() != rate {
            let reason = format!("its rate goes from {rate} Hz to {}", decoded.spec().rate());
            return Err(unreadable(reason));
        }
        let n_channels = decoded.spec().channels().count();
        check_channels(n_channels)?;
        decoded.copy_to_vec_interleaved::<f32>(&mut packet_samples);
        let mixed = packet_samples.chunks_exact(n_channels);
        samples.extend(mixed.map(|all| all.iter().sum::<f32>() / n_channels as f32));
        check_length(samples.len() as u64, rate, most_seconds)?;
    }
    match stated {
        Some(stated) if stated > samples.len() as u64 => {
            Err(cut_short(samples.len() as u64, stated))
        }
        _ => Ok((rate, samples)),
    }
}

/// True if this begins as an MP3 or FLAC file.
fn is_known(bytes: &[u8]) -> bool {
    let is_flac = bytes.starts_with(b"fLaC");
    let is_tagged = bytes.starts_with(b"ID3");
    // The eleven bits that begin a frame, of layer 3.
    let is_mp3 = matches!(bytes, [0xff, second, ..] if second & 0xe6 == 0xe2);
    is_flac || is_tagged || is_mp3
}

fn cut_short(there: u64, stated: u64) -> PictureError {
    unreadable(format!(
        "it is cut short: {there} of {stated} samples are there"
    ))
}

fn check_rate(rate: u32) -> Result<(), PictureError> {
    let [lowest, highest] = RATES;
    if (lowest..=highest).contains(&rate) {
        Ok(())
    } else {
        Err(unreadable(format!(
            "it has {rate} samples of a second: {lowest} to {highest} are taken"
        )))
    }
}

fn check_channels(n_channels: usize) -> Result<(), PictureError> {
    if (1..=MAX_CHANNELS).contains(&n_channels) {
        Ok(())
    } else {
        Err(unreadable(format!(
            "it has {n_channels} channels: 1 to {MAX_CHANNELS} are taken"
        )))
    }
}

/// Refuses more than so many seconds. What is a part of a second too long is rounded up in the
/// error.
fn check_length(n_samples: u64, rate: u32, most_seconds: u32) -> Result<(), PictureError> {
    let rate = u64::from(rate);
    if n_samples <= u64::from(most_seconds) * rate {
        return Ok(());
    }
    Err(PictureError::TooLarge {
        media: MediaKind::Sound,
        got: n_samples.div_ceil(rate),
        unit: "seconds",
        limit: u64::from(most_seconds),
    })
}

fn unreadable(reason: impl ToString) -> PictureError {
    let reason = reason.to_string();
    let media = MediaKind::Sound;
    PictureError::Unreadable { media, reason }
}
