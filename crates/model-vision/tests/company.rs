//! Pieces of pictures: rows have the same bits whatever is computed together with them, or between
//! their pieces.

#![allow(clippy::unwrap_used)] // a test

use kv_backend::{Backend, BackendError, CancelFlag};
use model_core::picture::{PartialPicture, Picture, PictureEncoder, PictureError, PictureWork};
use model_tests::vision::{MODELS, SIZES, all_models, media};
use model_tests::{candle, cpu, distance};
use model_vision::{TowerEncoder, Vision};

use crate::towers::open;

/// Largest difference where a backend does not promise the same bits.
const TOLERANCE: f32 = 2e-5;

fn read(vision: &Vision, sizes: &[[u32; 2]]) -> Vec<Picture> {
    let reader = vision.reader();
    let kind = reader.media();
    let read = |&size: &_| reader.read_media(kind, &media(kind, size)).unwrap();
    let pictures = sizes.iter().map(read);
    pictures.map(|read| (*read.picture).clone()).collect()
}

/// Pictures that are computed together as an engine does it.
struct Company<'a> {
    pictures: Vec<&'a Picture>,
    partials: Vec<PartialPicture>,
    /// Number of pictures of each piece.
    pieces: Vec<usize>,
}

impl<'a> Company<'a> {
    fn of(pictures: impl IntoIterator<Item = &'a Picture>) -> Self {
        let pictures: Vec<&Picture> = pictures.into_iter().collect();
        Self {
            partials: vec![PartialPicture::default(); pictures.len()],
            pictures,
            pieces: Vec::new(),
        }
    }

    /// Computes the next piece. False where all is done.
    fn advance<B: Backend>(
        &mut self,
        encoder: &mut TowerEncoder<B>,
        cancel: &CancelFlag,
    ) -> Result<bool, PictureError> {
        let both = self.pictures.iter().zip(&mut self.partials);
        let works = both.map(|(&picture, partial)| PictureWork { picture, partial });
        let works: Vec<_> = works.filter(|work| work.partial.rows.is_none()).collect();
        if works.is_empty() {
            return Ok(false);
        }
        let picked = encoder.picks(&works);
        assert_eq!(picked[0], 0, "the first one is always computed");
        let works = works.into_iter().enumerate();
        let works = works.filter(|(number, _)| picked.contains(number));
        let mut works: Vec<_> = works.map(|(_, work)| work).collect();
        self.pieces.push(works.len());
        encoder.encode_piece(&mut works, cancel)?;
        Ok(true)
    }

    /// Computes all that is left, and gives the rows.
    fn finish<B: Backend>(&mut self, encoder: &mut TowerEncoder<B>) -> Vec<Vec<f32>> {
        while self.advance(encoder, &CancelFlag::default()).unwrap() {}
        let rows = self.partials.iter_mut().map(|partial| partial.rows.take());
        rows.map(Option::unwrap).collect()
    }
}

fn alone<B: Backend>(encoder: &mut TowerEncoder<B>, pictures: &[Picture]) -> Vec<Vec<f32>> {
    let cancel = CancelFlag::default();
    let rows = pictures
        .iter()
        .map(|picture| encoder.encode(picture, &cancel));
    rows.map(Result::unwrap).collect()
}

/// Layer by layer and in one piece, between those of another picture and alone.
#[test]
fn rows_do_not_depend_on_pieces() {
    let cancel = CancelFlag::default();
    for (name, mark) in MODELS {
        let vision = open(name, mark);
        let pictures = read(&vision, &SIZES);
        let mut whole = vision.encoder(cpu()).unwrap().with_piece_rows(usize::MAX);
        let wanted = alone(&mut whole, &pictures);
        let mut layers = vision.encoder(cpu()).unwrap().with_piece_rows(1);
        let mut each: Vec<_> = pictures.iter().map(|one| Company::of([one])).collect();
        let mut n_pieces = 0;
        loop {
            let both = each.iter_mut();
            let went_on = both.map(|one| one.advance(&mut layers, &cancel).unwrap());
            match went_on.filter(|&goes| goes).count() {
                0 => break,
                n => n_pieces += n,
            }
        }
        let n_tiles: usize = pictures.iter().map(|picture| picture.tiles().len()).sum();
        // Two layers at least, and the projector.
        assert!(n_pieces >= 3 * n_tiles, "{name}: {n_pieces} of {n_tiles}");
        for (one, wanted) in each.iter_mut().zip(&wanted) {
            assert!(one.finish(&mut layers)[0] == *wanted, "{name}");
        }
    }
}

/// Pictures of several sizes, one of them twice, in pieces of any size.
#[test]
fn rows_do_not_depend_on_company() {
    let sizes = [SIZES[1], SIZES[0], [32, 24], SIZES[1]];
    for (name, mark) in all_models() {
        let vision = open(name, mark);
        let pictures = read(&vision, &sizes);
        let mut layers = vision.encoder(cpu()).unwrap().with_piece_rows(1);
        let wanted = alone(&mut layers, &pictures);
        for piece_rows in [usize::MAX, 300, 50] {
            let mut encoder = vision.encoder(cpu()).unwrap().with_piece_rows(piece_rows);
            let mut company = Company::of(&pictures);
            assert!(
                company.finish(&mut encoder) == wanted,
                "{name}, {piece_rows}"
            );
            if piece_rows == usize::MAX {
                // All layers at once, or those before and behind a merger; and the projectors.
                let all = sizes.len();
                assert!(company.pieces.iter().all(|&n| n == all), "{name}");
                assert!(company.pieces.len() <= 5, "{name}: {:?}", company.pieces);
            }
        }
        let mut encoder = vision.encoder(candle()).unwrap();
        let rows = Company::of(&pictures).finish(&mut encoder);
        for (rows, wanted) in rows.iter().zip(alone(&mut encoder, &pictures)) {
            let off = distance(rows, &wanted);
            assert!(off < TOLERANCE, "{name} on candle: off by {off}");
        }
    }
}

/// A picture that is left, and all that are, change no bit of others, nor of themselves later.
#[test]
fn others_go_on_where_a_picture_is_left() {
    for name in ["qwen2_5_vl", "llava_next", "minicpmv4_6"] {
        let (_, mark) = MODELS.into_iter().find(|(of, _)| *of == name).unwrap();
        let vision = open(name, mark);
        let pictures = read(&vision, &SIZES);
        let mut encoder = vision.encoder(cpu()).unwrap();
        let wanted = alone(&mut encoder, &pictures);
        let mut encoder = vision.encoder(cpu()).unwrap().with_piece_rows(200);
        for left in [0, 1] {
            let mut company = Company::of(&pictures);
            company
                .advance(&mut encoder, &CancelFlag::default())
                .unwrap();
            company.pictures.remove(left);
            company.partials.remove(left);
            assert!(
                company.finish(&mut encoder)[0] == wanted[1 - left],
                "{name}"
            );
        }
        let mut company = Company::of(&pictures);
        let cancel = CancelFlag::default();
        company.advance(&mut encoder, &cancel).unwrap();
        cancel.cancel();
        let error = company.advance(&mut encoder, &cancel).unwrap_err();
        assert!(matches!(
            error,
            PictureError::Backend(BackendError::Cancelled)
        ));
        assert!(
            Company::of(&pictures).finish(&mut encoder) == wanted,
            "{name}"
        );
    }
}

/// The limit of a piece is one for all of its tiles together, and those at other steps wait.
#[test]
fn a_piece_has_a_limit_for_all_pictures_together() {
    let vision = open("qwen2_vl", MODELS[0].1);
    let pictures = read(&vision, &[SIZES[1], SIZES[0], SIZES[1]]);
    let n_rows = |number: usize| pictures[number].tiles()[0].places.len();
    let (small, large) = (n_rows(0), n_rows(1));
    assert!(large > 2 * small);
    let first_piece = |piece_rows: usize| {
        let mut encoder = vision.encoder(cpu()).unwrap().with_piece_rows(piece_rows);
        let mut company = Company::of(&pictures);
        company
            .advance(&mut encoder, &CancelFlag::default())
            .unwrap();
        let begun = company.partials.iter();
        let begun = begun.map(|partial| !partial.tiles.is_empty());
        (encoder, begun.collect::<Vec<_>>())
    };
    assert_eq!(first_piece(2 * small - 1).1, [true, false, false]);
    // The large one does not fit next to the first, the one behind it does.
    assert_eq!(first_piece(2 * small).1, [true, false, true]);
    assert_eq!(first_piece(small + large).1, [true, true, false]);
    let (mut encoder, begun) = first_piece(2 * small + large);
    assert_eq!(begun, [true; 3]);
    let mut company = Company::of(&pictures[..1]);
    company
        .advance(&mut encoder, &CancelFlag::default())
        .unwrap();
    let (picture, partial) = (&pictures[0], &mut company.partials[0]);
    let ahead = PictureWork { picture, partial };
    let (picture, partial) = (&pictures[2], &mut PartialPicture::default());
    let behind = PictureWork { picture, partial };
    assert_eq!(encoder.picks(&[ahead, behind]), [0]);
}
