//! The query of an address: `?model=NAME`.
//!
//! Invariant: what is not UTF-8 after decoding is not there.

use axum::http::Uri;

/// The value of a name in the query of an address.
pub(crate) fn value(uri: &Uri, name: &str) -> Option<String> {
    let mut pairs = uri.query()?.split('&');
    pairs.find_map(|pair| {
        let (found, value) = pair.split_once('=')?;
        (decode(found)? == name).then(|| decode(value))?
    })
}

/// The text of a part of a query, in which `+` is a space and `%XX` a byte.
fn decode(text: &str) -> Option<String> {
    let mut bytes = text.bytes();
    let mut decoded = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        decoded.push(match byte {
            b'+' => b' ',
            b'%' => {
                let mut digit = || char::from(bytes.next()?).to_digit(16);
                u8::try_from(digit()? * 16 + digit()?).ok()?
            }
            byte => byte,
        });
    }
    String::from_utf8(decoded).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_decoded() {
        let uri = Uri::from_static("/props?a=1&model=a%2Fb%3Aq4+k&model=c&bad=%f");
        assert_eq!(value(&uri, "model").as_deref(), Some("a/b:q4 k"));
        assert_eq!(value(&uri, "a").as_deref(), Some("1"));
        assert_eq!(value(&uri, "bad"), None);
        assert_eq!(value(&uri, "none"), None);
        assert_eq!(value(&Uri::from_static("/props"), "model"), None);
    }
}
