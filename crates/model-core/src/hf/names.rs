//! Names with places for numbers: `model.layers.{l}.mlp.experts.{e}.up_proj.weight`.

/// The numbers in a name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Numbers {
    pub(super) layer: Option<u32>,
    /// The place of a layer in its group: `layer` is the group's number then.
    pub(super) inner: Option<u32>,
    pub(super) expert: Option<u32>,
}

impl Numbers {
    /// One number for a layer of a group of `len`; `None` where the group has no such layer.
    pub(super) fn joined(self, len: u32) -> Option<Self> {
        let Some(inner) = self.inner else {
            return Some(self);
        };
        let first = self.layer?.checked_mul(len)?;
        let layer = first.checked_add(inner).filter(|_| inner < len)?;
        Some(Self {
            layer: Some(layer),
            inner: None,
            ..self
        })
    }

    /// The opposite of [`Self::joined`].
    pub(super) fn in_groups(self, len: u32) -> Self {
        let len = len.max(1);
        Self {
            layer: self.layer.map(|layer| layer / len),
            inner: self.layer.map(|layer| layer % len),
            ..self
        }
    }
}

/// The numbers of `name` where it has the form of `pattern`.
pub(super) fn matched(pattern: &str, name: &str) -> Option<Numbers> {
    let mut numbers = Numbers::default();
    let (mut pattern, mut name) = (pattern, name);
    while let Some(at) = pattern.find('{') {
        name = name.strip_prefix(&pattern[..at])?;
        let (place, rest) = pattern[at..].split_at_checked(3)?;
        let digits = name.bytes().take_while(u8::is_ascii_digit).count();
        let (number, after) = name.split_at(digits);
        // `01` would be another name than `1`, but the same number.
        if digits > 1 && number.starts_with('0') {
            return None;
        }
        let number = Some(number.parse().ok()?);
        match place {
            "{l}" => numbers.layer = number,
            "{i}" => numbers.inner = number,
            _ => numbers.expert = number,
        }
        (pattern, name) = (rest, after);
    }
    (pattern == name).then_some(numbers)
}

/// `pattern` with its numbers filled in.
pub(super) fn filled(pattern: &str, numbers: Numbers) -> String {
    let mut name = pattern.to_owned();
    let places = [
        ("{l}", numbers.layer),
        ("{i}", numbers.inner),
        ("{e}", numbers.expert),
    ];
    for (place, number) in places {
        if let Some(number) = number {
            name = name.replace(place, &number.to_string());
        }
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_out_of_names() {
        let both = Numbers {
            layer: Some(12),
            expert: Some(0),
            ..Numbers::default()
        };
        assert_eq!(matched("m.{l}.e.{e}.w", "m.12.e.0.w"), Some(both));
        assert_eq!(filled("b.{l}.{e}", both), "b.12.0");
        assert_eq!(matched("m.{l}.w", "m.12.w.x"), None);
        assert_eq!(matched("m.{l}.w", "m..w"), None);
        assert_eq!(matched("m.{l}.w", "m.01.w"), None);
        assert_eq!(matched("m.{l}.w", "m.99999999999.w"), None);
        assert_eq!(matched("m.w", "m.w"), Some(Numbers::default()));
    }

    #[test]
    fn layers_of_groups_are_counted_through() {
        let pattern = "groups.{l}.layers.{i}.w";
        for (len, layer, name) in [
            (1, 3, "groups.3.layers.0.w"),
            (2, 5, "groups.2.layers.1.w"),
            (3, 6, "groups.2.layers.0.w"),
        ] {
            let joined = matched(pattern, name).unwrap_or_default().joined(len);
            let numbers = Numbers {
                layer: Some(layer),
                ..Numbers::default()
            };
            assert_eq!(joined, Some(numbers), "{name}");
            assert_eq!(filled(pattern, numbers.in_groups(len)), name);
        }
        let beyond = matched(pattern, "groups.0.layers.2.w").unwrap_or_default();
        assert_eq!(beyond.joined(2), None);
        let largest = matched(pattern, "groups.4294967295.layers.1.w").unwrap_or_default();
        assert_eq!(largest.joined(2), None);
    }
}
