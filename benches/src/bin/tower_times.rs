//! The tower of a model on pictures of one tile each: one by one, and together as an engine
//! computes those of several texts, in turns. Both ways must give the same bits.
//!
//! ```sh
//! tower_times MODEL MMPROJ.gguf [ROUNDS [PICTURES [SIDE [THREADS]]]]
//! ```
//!
//! SIDE is the number of patches in a row of a picture, 0 for those of the tower. With one thread,
//! as it is where THREADS is not given, times are those that the thread computes, so other programs
//! disturb them little; with more, they are those of the clock. Knows no format of pictures:
//! patches are random.

use std::num::NonZeroUsize;
use std::path::Path;
use std::time::Instant;

use cellar_benches::{Failure, SeededRandom, cpu_seconds, median};
use kv_backend::CancelFlag;
use kv_core::grid::GridPos;
use kv_cpu::{CpuBackend, CpuConfig};
use model_core::architecture::Registry;
use model_core::gguf::GgufFile;
use model_core::model_file::ModelFile;
use model_core::picture::{
    PartialPicture, Picture, PictureEncoder, PictureName, PictureWork, Tile,
};
use model_vision::{TowerEncoder, Vision};

const USAGE: &str = "usage: tower_times MODEL MMPROJ.gguf [ROUNDS [PICTURES [SIDE [THREADS]]]]";

fn main() -> Result<(), Failure> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [model, mmproj, numbers @ ..] = args.as_slice() else {
        return Err(USAGE.into());
    };
    let number = |at: usize, or: usize| numbers.get(at).map_or(Ok(or), |text| text.parse());
    let mut registry = Registry::new();
    model_llama::register(&mut registry);
    let file = ModelFile::open(model, &registry)?;
    let (model, mmproj) = (Path::new(model), Path::new(mmproj));
    let vision = Vision::of(&file, model, Some(mmproj))?.ok_or("there is no tower")?;
    let metadata = GgufFile::open(mmproj)?;
    let size = |key: &str| metadata.metadata().get::<u32>(key);
    let patch = size("clip.vision.patch_size")? as usize;
    let side = size("clip.vision.image_size")? as usize / patch.max(1);
    let (rounds, n, threads) = (number(0, 5)?, number(1, 1)?, number(3, 1)?);
    let side = match number(2, 0)? {
        0 => side,
        given => given,
    };
    let backend = CpuBackend::new(CpuConfig {
        n_threads: NonZeroUsize::new(threads),
        ..CpuConfig::default()
    })?;
    let mut encoder = vision.encoder(backend)?;
    let pictures: Vec<Picture> = (0..n).map(|n| random_picture(n, side, patch)).collect();
    let (mut alone, mut together) = (Vec::new(), Vec::new());
    for round in 0..=rounds {
        let (took, rows) = timed(threads, || one_by_one(&mut encoder, &pictures))?;
        let (took_together, others) = timed(threads, || all_together(&mut encoder, &pictures))?;
        if rows != others {
            return Err("rows of pictures that are computed together are others".into());
        }
        // The first one compiles graphs and reads weights.
        if round > 0 {
            println!("one by one {took:.3} s, together {took_together:.3} s");
            alone.push(took);
            together.push(took_together);
        }
    }
    let ratios = alone.iter().zip(&together).map(|(a, b)| a / b).collect();
    println!(
        "{n} of {side} x {side} patches: one by one {:.3} s, together {:.3} s, ratio {:.2}",
        median(alone),
        median(together),
        median(ratios)
    );
    Ok(())
}

type Rows = Vec<Option<Vec<f32>>>;

fn timed(
    n_threads: usize,
    compute: impl FnOnce() -> Result<Rows, Failure>,
) -> Result<(f64, Rows), Failure> {
    let (began, computed) = (Instant::now(), cpu_seconds()?);
    let rows = compute()?;
    let took = if n_threads > 1 {
        began.elapsed().as_secs_f64()
    } else {
        cpu_seconds()? - computed
    };
    Ok((took, rows))
}

fn one_by_one(encoder: &mut TowerEncoder<CpuBackend>, all: &[Picture]) -> Result<Rows, Failure> {
    let cancel = CancelFlag::default();
    let rows = all
        .iter()
        .map(|one| Ok(Some(encoder.encode(one, &cancel)?)));
    rows.collect()
}

fn all_together(encoder: &mut TowerEncoder<CpuBackend>, all: &[Picture]) -> Result<Rows, Failure> {
    let mut partials: Vec<PartialPicture> = all.iter().map(|_| PartialPicture::default()).collect();
    loop {
        let works = all.iter().zip(&mut partials);
        let works = works.map(|(picture, partial)| PictureWork { picture, partial });
        let mut works: Vec<_> = works.filter(|work| work.partial.rows.is_none()).collect();
        if works.is_empty() {
            return Ok(partials.into_iter().map(|partial| partial.rows).collect());
        }
        encoder.encode_piece(&mut works, &CancelFlag::default())?;
    }
}

fn random_picture(number: usize, side: usize, patch: usize) -> Picture {
    let mut random = SeededRandom::new(number as u64);
    let places = (0..side * side).map(|at| GridPos {
        y: (at / side) as u32,
        x: (at % side) as u32,
    });
    let tile = Tile {
        patches: (0..side * side * 3 * patch * patch)
            .map(|_| random.unit())
            .collect(),
        positions: (0..(side * side) as u32).collect(),
        places: places.collect(),
        order: Vec::new(),
    };
    let mut name = [0; 16];
    name[..8].copy_from_slice(&(number as u64).to_le_bytes());
    // The number of rows is the projector's; the tower does not ask.
    Picture::new(PictureName(name), vec![tile], side * side, None)
}
