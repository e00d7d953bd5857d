//! Names with places for numbers: `model.layers.{l}.mlp.experts.{e}.up_proj.weight`.

/// The numbers in a name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Numbers {
    pub(super) layer: Option<u32>,
    pub(super) expert: Option<u32>,
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
            _ => numbers.expert = number,
        }
        (pattern, name) = (rest, after);
    }
    (pattern == name).then_some(numbers)
}

/// `pattern` with its numbers filled in.
pub(super) fn filled(pattern: &str, numbers: Numbers) -> String {
    let mut name = pattern.to_owned();
    for (place, number) in [("{l}", numbers.layer), ("{e}", numbers.expert)] {
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
        };
        assert_eq!(matched("m.{l}.e.{e}.w", "m.12.e.0.w"), Some(both));
        assert_eq!(filled("b.{l}.{e}", both), "b.12.0");
        assert_eq!(matched("m.{l}.w", "m.12.w.x"), None);
        assert_eq!(matched("m.{l}.w", "m..w"), None);
        assert_eq!(matched("m.{l}.w", "m.01.w"), None);
        assert_eq!(matched("m.{l}.w", "m.99999999999.w"), None);
        assert_eq!(matched("m.w", "m.w"), Some(Numbers::default()));
    }
}
