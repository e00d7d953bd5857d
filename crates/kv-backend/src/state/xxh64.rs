//! XXH64, the checksum of states: 64 bits, fast on any machine, computed as bytes pass by.
//!
//! Written from Yann Collet's specification of the algorithm ("xxHash fast digest algorithm",
//! version 0.2.0). It finds accidents, not attacks. Invariant: the same bytes in the same order
//! give the same number, in whichever pieces they come.

const P1: u64 = 0x9E37_79B1_85EB_CA87;
const P2: u64 = 0xC2B2_AE3D_27D4_EB4F;
const P3: u64 = 0x1656_67B1_9E37_79F9;
const P4: u64 = 0x85EB_CA77_C2B2_AE63;
const P5: u64 = 0x27D4_EB2F_1656_67C5;

/// Bytes that are taken in at once.
const STRIPE: usize = 32;

/// A checksum under way.
#[derive(Clone, Debug)]
pub(super) struct Xxh64 {
    seed: u64,
    lanes: [u64; 4],
    /// The beginning of a stripe.
    rest: [u8; STRIPE],
    n_rest: usize,
    n_bytes: u64,
}

/// The checksum of `bytes`.
pub(super) fn xxh64(bytes: &[u8], seed: u64) -> u64 {
    let mut hash = Xxh64::new(seed);
    hash.update(bytes);
    hash.finish()
}

impl Xxh64 {
    pub(super) fn new(seed: u64) -> Self {
        let lanes = [
            seed.wrapping_add(P1).wrapping_add(P2),
            seed.wrapping_add(P2),
            seed,
            seed.wrapping_sub(P1),
        ];
        Self {
            seed,
            lanes,
            rest: [0; STRIPE],
            n_rest: 0,
            n_bytes: 0,
        }
    }

    pub(super) fn update(&mut self, mut bytes: &[u8]) {
        self.n_bytes = self.n_bytes.wrapping_add(bytes.len() as u64);
        if self.n_rest > 0 {
            let n = bytes.len().min(STRIPE - self.n_rest);
            let (now, later) = bytes.split_at(n);
            self.rest[self.n_rest..self.n_rest + n].copy_from_slice(now);
            self.n_rest += n;
            bytes = later;
            if self.n_rest < STRIPE {
                return;
            }
            let stripe = self.rest;
            self.take(&stripe);
            self.n_rest = 0;
        }
        let (stripes, rest) = bytes.as_chunks::<STRIPE>();
        stripes.iter().for_each(|stripe| self.take(stripe));
        self.rest[..rest.len()].copy_from_slice(rest);
        self.n_rest = rest.len();
    }

    pub(super) fn finish(&self) -> u64 {
        let mut hash = if self.n_bytes >= STRIPE as u64 {
            let [a, b, c, d] = self.lanes;
            let sum = a
                .rotate_left(1)
                .wrapping_add(b.rotate_left(7))
                .wrapping_add(c.rotate_left(12))
                .wrapping_add(d.rotate_left(18));
            let merge = |hash: u64, lane| (hash ^ round(0, lane)).wrapping_mul(P1).wrapping_add(P4);
            self.lanes.into_iter().fold(sum, merge)
        } else {
            self.seed.wrapping_add(P5)
        };
        hash = hash.wrapping_add(self.n_bytes);
        let (eights, rest) = self.rest[..self.n_rest].as_chunks::<8>();
        for eight in eights {
            hash ^= round(0, u64::from_le_bytes(*eight));
            hash = hash.rotate_left(27).wrapping_mul(P1).wrapping_add(P4);
        }
        let (fours, ones) = rest.as_chunks::<4>();
        for four in fours {
            hash ^= u64::from(u32::from_le_bytes(*four)).wrapping_mul(P1);
            hash = hash.rotate_left(23).wrapping_mul(P2).wrapping_add(P3);
        }
        for &one in ones {
            hash ^= u64::from(one).wrapping_mul(P5);
            hash = hash.rotate_left(11).wrapping_mul(P1);
        }
        hash = (hash ^ (hash >> 33)).wrapping_mul(P2);
        hash = (hash ^ (hash >> 29)).wrapping_mul(P3);
        hash ^ (hash >> 32)
    }

    fn take(&mut self, stripe: &[u8; STRIPE]) {
        for (lane, word) in self.lanes.iter_mut().zip(stripe.as_chunks::<8>().0) {
            *lane = round(*lane, u64::from_le_bytes(*word));
        }
    }
}

fn round(lane: u64, word: u64) -> u64 {
    lane.wrapping_add(word.wrapping_mul(P2))
        .rotate_left(31)
        .wrapping_mul(P1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn published_values() {
        for (text, seed, wanted) in [
            ("", 0, 0xEF46_DB37_51D8_E999),
            ("a", 0, 0xD24E_C4F1_A98C_6E5B),
            ("abc", 0, 0x44BC_2CF5_AD77_0999),
            (
                "Nobody inspects the spammish repetition",
                0,
                0xFBCE_A83C_8A37_8BF1,
            ),
        ] {
            assert_eq!(xxh64(text.as_bytes(), seed), wanted, "{text}");
        }
        // Of another implementation.
        let bytes: Vec<u8> = (0..101).collect();
        for (n, wanted) in [
            (101, 0xE878_E979_1DBC_64FA),
            (8, 0x3072_F8C5_CBA4_3E9A),
            (31, 0x0BDB_BCAE_AD6C_6E56),
            (32, 0xA597_2D57_C4AE_A230),
            (33, 0x0C43_E577_54C7_78D9),
            (63, 0x379E_EAB4_056E_3988),
        ] {
            assert_eq!(xxh64(&bytes[..n], 7), wanted, "{n} bytes");
        }
        assert_eq!(
            xxh64(&bytes[..37], 0x9E37_79B9_7F4A_7C15),
            0x5475_DB57_4CAA_6A58
        );
    }

    proptest! {
        #[test]
        fn pieces_do_not_matter(
            bytes in prop::collection::vec(any::<u8>(), 0..300),
            cuts in prop::collection::vec(0usize..300, 0..5),
            seed: u64,
        ) {
            let mut hash = Xxh64::new(seed);
            let mut cuts: Vec<usize> = cuts.into_iter().map(|at| at.min(bytes.len())).collect();
            cuts.push(bytes.len());
            cuts.sort_unstable();
            let mut from = 0;
            for to in cuts {
                hash.update(&bytes[from..to]);
                from = to;
            }
            prop_assert_eq!(hash.finish(), xxh64(&bytes, seed));
        }
    }
}
