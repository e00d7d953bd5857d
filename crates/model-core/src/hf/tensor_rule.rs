//! [`TensorRule`]: which tensors of the files become which of GGUF, as data. Knows no file.

use super::class::as_u32;
use super::names::{Numbers, matched};
use super::{HfClass, HfConfig, ModelFileError, TensorStep};

/// One GGUF tensor and the tensors that it is made of. `{l}` is the layer; where `from` has an
/// `{e}`, the tensors of all experts are stacked, unless `to` has one, too; where it has an `{i}`,
/// `{l}` is a group of layers there and `{i}` the layer's place in it. Made by [`same`] and
/// [`with`].
#[derive(Clone, Copy, Debug)]
pub struct TensorRule {
    /// The beginning of both names, see [`in_layers`](super::in_layers).
    pub(super) to_place: &'static str,
    pub(super) from_place: &'static str,
    to: &'static str,
    from: &'static str,
    steps: &'static [TensorStep],
    /// Another beginning of names in files.
    beginning: Option<OtherBeginning>,
    /// Layers of a group.
    pub(super) group_len: u32,
}

/// A beginning of names in files in the place of that of a rule: that of the text decoder of a
/// model with other towers, for example.
#[derive(Clone, Copy, Debug)]
struct OtherBeginning {
    /// The rule's.
    of_rule: &'static str,
    /// The files', in two parts.
    in_files: [&'static str; 2],
}

impl TensorRule {
    /// The same for files whose names lack this beginning.
    pub(super) fn without(self, prefix: &str) -> Self {
        let rest = |name: &'static str| name.strip_prefix(prefix);
        match (self.from_place, rest(self.from_place), rest(self.from)) {
            ("", _, Some(from)) => Self { from, ..self },
            (_, Some(from_place), _) => Self { from_place, ..self },
            _ => self,
        }
    }

    /// True if it makes the GGUF tensor of this name.
    pub(super) fn makes(&self, name: &str) -> bool {
        matched(&self.to(), name).is_some()
    }

    /// The change of the tensor on the way.
    pub(super) fn steps(&self) -> &'static [TensorStep] {
        self.steps
    }

    /// Pattern of the GGUF name.
    pub(super) fn to(&self) -> String {
        format!("{}{}", self.to_place, self.to)
    }

    /// Pattern of the name in the files.
    pub(super) fn from(&self) -> String {
        let name = format!("{}{}", self.from_place, self.from);
        let moved = self
            .beginning
            .and_then(|OtherBeginning { of_rule, in_files }| {
                let rest = name.strip_prefix(of_rule)?;
                Some(format!("{}{}{rest}", in_files[0], in_files[1]))
            });
        moved.unwrap_or(name)
    }

    /// The same for a model of the class with this config.
    pub(super) fn with_groups(
        self,
        class: &HfClass,
        config: &HfConfig,
    ) -> Result<Self, ModelFileError> {
        let Some((_, key)) = class.group_len else {
            return Ok(self);
        };
        let group_len = as_u32(config.optional_count(key)?.unwrap_or(1));
        Ok(Self { group_len, ..self })
    }

    /// The numbers in the name of a tensor of the files that it is for.
    pub(super) fn numbers(&self, name: &str) -> Option<Numbers> {
        matched(&self.from(), name)?.joined(self.group_len)
    }

    /// The same for files whose names begin otherwise.
    pub(super) fn beginning_with(self, of_rule: &'static str, in_files: [&'static str; 2]) -> Self {
        let beginning = Some(OtherBeginning { of_rule, in_files });
        Self { beginning, ..self }
    }

    /// The same for each of the beginnings that files may have in place of its own.
    pub(super) fn in_places(self, class: &HfClass) -> impl Iterator<Item = Self> {
        let name = self.from();
        let places = class.places.iter();
        let places = places.filter(move |(of_rule, _)| name.starts_with(of_rule));
        places.flat_map(move |&(of_rule, in_files)| {
            let others = in_files.iter();
            others.map(move |&other| self.beginning_with(of_rule, [other, ""]))
        })
    }
}

/// A tensor that only has another name.
pub const fn same(to: &'static str, from: &'static str) -> TensorRule {
    with(to, from, &[])
}

/// A tensor that is changed on the way.
pub const fn with(
    to: &'static str,
    from: &'static str,
    steps: &'static [TensorStep],
) -> TensorRule {
    TensorRule {
        to_place: "",
        from_place: "",
        to,
        from,
        steps,
        beginning: None,
        group_len: 1,
    }
}
