//! [`Family`]: what a projector type means for tower, pictures or sounds, and prompts, a row each.
//!
//! Invariant: a type that is not in the table is refused by its name. Knows no file.

use model_core::media::MediaKind;

/// The kind of a tower's layers and positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TowerKind {
    /// Rotated by rows and columns; patches join by squares (Qwen2-VL, Wang et al., arXiv
    /// 2409.12191).
    Qwen2Vl,
    /// The same with RMS norms, gates and windows (Qwen2.5-VL, Bai et al., arXiv 2502.13923).
    Qwen25Vl,
    /// Learned positions that are resampled, rotated by rows and columns besides, plain matrices
    /// (Qwen3-VL, arXiv 2511.21631).
    Qwen3Vl,
    /// Learned positions that are resampled, rotated by rows and columns besides, RMS norms, one of
    /// them behind the patches, and gates (GLM-4.1V, arXiv 2507.01006).
    Glm4v,
    /// Learned positions behind a row of its own, factors on what layers add (InternViT, Chen et
    /// al., arXiv 2312.14238).
    InternVit,
    /// Learned positions, no row before patches (SigLIP, Zhai et al., arXiv 2303.15343).
    SigLip,
    /// The same, resampled to the shape of each picture (SigLIP 2, Tschannen et al., arXiv
    /// 2502.14786).
    SigLip2,
    /// The same, the nearest ones for the shape of each picture, with a merger between two layers
    /// (MiniCPM-V 4.6).
    MiniCpm,
    /// Learned positions behind a row of its own, a norm at the beginning (CLIP, Radford et al.,
    /// arXiv 2103.00020).
    Clip,
    /// Learned positions and a row of its own behind them, rotated by columns and rows besides
    /// (Llama 4).
    Llama4,
    /// Learned positions of columns and of rows, rotated by both besides, four RMS norms a layer,
    /// gates, normed values, bounded matrices (Gemma 4).
    Gemma4,
    /// Rotated by rows and columns with frequencies in turn, RMS norms, gates, no biases (Pixtral,
    /// Agrawal et al., arXiv 2410.07073).
    Pixtral,
    /// Hears: two convolutions over frames, learned positions (Whisper, Radford et al., arXiv
    /// 2212.04356).
    Whisper,
}

impl TowerKind {
    /// The kind of media that it makes rows of.
    pub(crate) fn media(self) -> MediaKind {
        match self {
            Self::Whisper => MediaKind::Sound,
            _ => MediaKind::Picture,
        }
    }
}

/// The projector between a tower and a decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProjectorKind {
    /// Two matrices with GELU between them, `mm.0` and `mm.2`.
    TwoMatrices,
    /// The same, `mm.1` and `mm.2`, behind a matrix that merges squares where there is one
    /// (Mistral 3).
    Merged,
    /// Squares become one row by a matrix, which is followed by a second one, a norm, GELU and a
    /// block with a gate (GLM-4.1V).
    Gated,
    /// The mean of squares, a norm and a matrix (Gemma 3).
    Averaged,
    /// The mean of squares, scaled and standardized where there are values for that, a norm without
    /// a gain and a matrix (Gemma 4).
    Standardized,
    /// Squares become one row, a norm and two matrices with GELU between them (InternVL).
    NormedSquares,
    /// Squares become one row, and a matrix (Idefics 3).
    Squares,
    /// Squares become one row, two matrices with GELU behind each, and a third (Llama 4).
    ActivatedSquares,
    /// Squares become one row, a norm where there is one, and two matrices with GELU between them,
    /// `mm.1` and `mm.2` (LFM2-VL).
    MergedSquares,
    /// Squares become one row, a norm and two matrices with GELU between them, `mm.up` and
    /// `mm.down` (MiniCPM-V 4.6).
    UpDown,
    /// The mean of two rows that follow each other, a norm and a matrix (Qwen2-Audio).
    NormedPairs,
}

/// The text that stands for a picture in a prompt, around placeholders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PictureText {
    /// One for all rows, with text before and after it.
    Around([&'static str; 2]),
    /// One for each row of patches, with tokens after each and after the last.
    RowEnds([&'static str; 2]),
    /// One for each tile, which tokens with its row and column name.
    Tiles(TileNames),
    /// One for the whole, and one for each slice behind it.
    Slices(SliceNames),
}

/// The text around the placeholders of the whole and of slices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SliceNames {
    /// Before and behind the number of a picture in its prompt, from 0 on.
    pub(crate) number: [&'static str; 2],
    /// Before and behind the whole.
    pub(crate) whole: [&'static str; 2],
    /// Before and behind a slice.
    pub(crate) slice: [&'static str; 2],
    /// Between rows of slices.
    pub(crate) row_end: &'static str,
}

/// The text around the placeholders of tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TileNames {
    pub(crate) start: &'static str,
    pub(crate) tile: TileText,
    /// Behind each row of tiles.
    pub(crate) row_end: &'static str,
    /// Before the whole behind tiles.
    pub(crate) whole: &'static str,
    /// Before the whole without tiles.
    pub(crate) alone: &'static str,
    pub(crate) end: &'static str,
}

/// The text that tells tiles apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TileText {
    /// Before each its name: the texts before, between and behind the numbers of its row and its
    /// column.
    Numbers([&'static str; 3]),
    /// Between those of a row.
    Between(&'static str),
}

const OF_IDEFICS3: TileNames = TileNames {
    start: "",
    tile: TileText::Numbers(["<fake_token_around_image><row_", "_col_", ">"]),
    row_end: "\n",
    whole: "\n<fake_token_around_image><global-img>",
    alone: "<fake_token_around_image><global-img>",
    end: "<fake_token_around_image>",
};

const OF_MINICPM: SliceNames = SliceNames {
    number: ["<image_id>", "</image_id>"],
    whole: ["<image>", "</image>"],
    slice: ["<slice>", "</slice>"],
    row_end: "\n",
};

const OF_LFM2: TileNames = TileNames {
    start: "<|image_start|>",
    tile: TileText::Numbers(["<|img_row_", "_col_", "|>"]),
    row_end: "",
    whole: "<|img_thumbnail|>",
    alone: "",
    end: "<|image_end|>",
};

const OF_LLAMA4: TileNames = TileNames {
    start: "<|image_start|>",
    tile: TileText::Between("<|tile_x_separator|>"),
    row_end: "<|tile_y_separator|>",
    whole: "<|image|>",
    alone: "<|image|>",
    end: "<|image_end|>",
};

/// The rows of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Family {
    /// `clip.vision.projector_type`, or `clip.audio.projector_type`
    pub(crate) name: &'static str,
    pub(crate) tower: TowerKind,
    pub(crate) projector: ProjectorKind,
    /// The text that chat templates write for a picture.
    pub(crate) mark: &'static str,
    /// The token in whose places rows of pictures stand, where the file does not say it.
    pub(crate) placeholder: &'static str,
    pub(crate) text: PictureText,
    /// True if rows of a picture all see each other in the decoder, where the file does not say.
    pub(crate) sees_itself: bool,
}

/// All that is supported.
pub(crate) const FAMILIES: &[Family] = &[
    Family {
        name: "qwen2vl_merger",
        tower: TowerKind::Qwen2Vl,
        projector: ProjectorKind::TwoMatrices,
        mark: "<|image_pad|>",
        placeholder: "<|image_pad|>",
        text: PictureText::Around(["", ""]),
        sees_itself: false,
    },
    Family {
        name: "qwen2.5vl_merger",
        tower: TowerKind::Qwen25Vl,
        projector: ProjectorKind::TwoMatrices,
        mark: "<|image_pad|>",
        placeholder: "<|image_pad|>",
        text: PictureText::Around(["", ""]),
        sees_itself: false,
    },
    Family {
        name: "qwen3vl_merger",
        tower: TowerKind::Qwen3Vl,
        projector: ProjectorKind::TwoMatrices,
        mark: "<|image_pad|>",
        placeholder: "<|image_pad|>",
        text: PictureText::Around(["", ""]),
        sees_itself: false,
    },
    Family {
        name: "glm4v",
        tower: TowerKind::Glm4v,
        projector: ProjectorKind::Gated,
        mark: "<|image|>",
        placeholder: "<|image|>",
        text: PictureText::Around(["", ""]),
        sees_itself: false,
    },
    Family {
        name: "mlp",
        tower: TowerKind::Clip,
        projector: ProjectorKind::TwoMatrices,
        mark: "<image>",
        placeholder: "<image>",
        text: PictureText::Around(["", ""]),
        sees_itself: false,
    },
    Family {
        name: "gemma3",
        tower: TowerKind::SigLip,
        projector: ProjectorKind::Averaged,
        mark: "<start_of_image>",
        placeholder: "<image_soft_token>",
        text: PictureText::Around(["\n\n<start_of_image>", "<end_of_image>\n\n"]),
        sees_itself: true,
    },
    Family {
        name: "gemma4v",
        tower: TowerKind::Gemma4,
        projector: ProjectorKind::Standardized,
        mark: "<|image|>",
        placeholder: "<|image|>",
        text: PictureText::Around(["<|image>", "<image|>"]),
        sees_itself: true,
    },
    Family {
        name: "pixtral",
        tower: TowerKind::Pixtral,
        projector: ProjectorKind::Merged,
        mark: "[IMG]",
        placeholder: "[IMG]",
        text: PictureText::RowEnds(["[IMG_BREAK]", "[IMG_END]"]),
        sees_itself: false,
    },
    Family {
        name: "internvl",
        tower: TowerKind::InternVit,
        projector: ProjectorKind::NormedSquares,
        mark: "<IMG_CONTEXT>",
        placeholder: "<IMG_CONTEXT>",
        text: PictureText::Around(["<img>", "</img>"]),
        sees_itself: false,
    },
    Family {
        name: "idefics3",
        tower: TowerKind::SigLip,
        projector: ProjectorKind::Squares,
        mark: "<image>",
        placeholder: "<image>",
        text: PictureText::Tiles(OF_IDEFICS3),
        sees_itself: false,
    },
    Family {
        name: "llama4",
        tower: TowerKind::Llama4,
        projector: ProjectorKind::ActivatedSquares,
        mark: "<|image|>",
        placeholder: "<|patch|>",
        text: PictureText::Tiles(OF_LLAMA4),
        sees_itself: false,
    },
    Family {
        name: "minicpmv4_6",
        tower: TowerKind::MiniCpm,
        projector: ProjectorKind::UpDown,
        mark: "<|image_pad|>",
        placeholder: "<|image_pad|>",
        text: PictureText::Slices(OF_MINICPM),
        sees_itself: false,
    },
    Family {
        name: "lfm2",
        tower: TowerKind::SigLip2,
        projector: ProjectorKind::MergedSquares,
        mark: "<image>",
        placeholder: "<image>",
        text: PictureText::Tiles(OF_LFM2),
        sees_itself: false,
    },
    Family {
        name: "qwen2a",
        tower: TowerKind::Whisper,
        projector: ProjectorKind::NormedPairs,
        mark: "<|AUDIO|>",
        placeholder: "<|AUDIO|>",
        text: PictureText::Around(["", ""]),
        sees_itself: false,
    },
];

impl Family {
    /// The family of this projector type.
    pub(crate) fn of(name: &str) -> Option<&'static Self> {
        FAMILIES.iter().find(|family| family.name == name)
    }

    /// All names, for errors.
    pub(crate) fn names() -> String {
        let names: Vec<&str> = FAMILIES.iter().map(|family| family.name).collect();
        names.join(", ")
    }
}
