//! The sounds that references are about, as files: WAV and FLAC.

/// Samples of a second of the sounds.
pub const RATE: u32 = 16_000;

/// The samples of a rising tone and a lower one that falls, 80 times the first number and the
/// second.
pub fn samples([first, second]: [u32; 2]) -> Vec<i16> {
    let tone = |phase: i64| (phase.rem_euclid(65_536) - 32_768).abs() - 16_384;
    let sample = |n: i64| {
        let rising = tone(n * (900 + i64::from(second) + n / 4));
        (rising * 3).div_euclid(4) + tone(n * 90).div_euclid(4)
    };
    (0..i64::from(80 * first + second))
        .map(|n| sample(n) as i16)
        .collect()
}

/// The sound of these samples, as a WAV file of 16 bits.
pub fn sound(size: [u32; 2]) -> Vec<u8> {
    let samples = samples(size);
    wav(
        RATE,
        [1, 1, 16],
        &samples
            .iter()
            .flat_map(|s| s.to_le_bytes())
            .collect::<Vec<_>>(),
    )
}

/// A WAV file: samples of a second; format, channels and bits; the samples.
pub fn wav(rate: u32, [format, channels, bits]: [u16; 3], data: &[u8]) -> Vec<u8> {
    let n_bytes = data.len() as u32;
    let frame = channels * bits / 8;
    let mut file = b"RIFF".to_vec();
    file.extend((36 + n_bytes).to_le_bytes());
    file.extend(b"WAVEfmt ");
    file.extend(16u32.to_le_bytes());
    [format, channels]
        .iter()
        .for_each(|value| file.extend(value.to_le_bytes()));
    file.extend(rate.to_le_bytes());
    file.extend((rate * u32::from(frame)).to_le_bytes());
    [frame, bits]
        .iter()
        .for_each(|value| file.extend(value.to_le_bytes()));
    file.extend(b"data");
    file.extend(n_bytes.to_le_bytes());
    file.extend(data);
    file
}

/// A FLAC file of a sound, whose samples are stored as they are.
pub fn flac(size: [u32; 2]) -> Vec<u8> {
    const BLOCK: usize = 4096;
    let samples = samples(size);
    let mut file = b"fLaC".to_vec();
    file.extend([0x80, 0, 0, 34]); // The last block before the frames.
    file.extend([BLOCK as u16, BLOCK as u16].map(u16::to_be_bytes).concat());
    file.extend([0; 6]);
    // Rate, one channel, 16 bits, and the number of samples.
    let stream = u64::from(RATE) << 44 | 15 << 36 | samples.len() as u64;
    file.extend(stream.to_be_bytes());
    file.extend([0; 16]);
    for (number, block) in samples.chunks(BLOCK).enumerate() {
        let n = (block.len() - 1) as u16;
        let mut frame = vec![0xff, 0xf8, 0x70, 0x08, number as u8];
        frame.extend(n.to_be_bytes());
        frame.push(remainder(&frame, 8, 0x07) as u8);
        frame.push(2);
        block
            .iter()
            .for_each(|sample| frame.extend(sample.to_be_bytes()));
        let sum = remainder(&frame, 16, 0x8005);
        frame.extend(sum.to_be_bytes());
        file.extend(frame);
    }
    file
}

/// The check sum of so many bits with this polynomial.
fn remainder(bytes: &[u8], n_bits: u32, polynomial: u32) -> u16 {
    let top = 1 << (n_bits - 1);
    let sum = bytes.iter().fold(0u32, |sum, &byte| {
        (0..8).fold(sum ^ u32::from(byte) << (n_bits - 8), |sum, _| {
            let shifted = sum << 1 & ((1 << n_bits) - 1);
            if sum & top == 0 {
                shifted
            } else {
                shifted ^ polynomial
            }
        })
    });
    sum as u16
}
