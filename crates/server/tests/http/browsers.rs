//! Web pages and proxies: the server's answers to the headers that browsers and proxies send.

use cellar_server::{HostCheck, Origins};
use model_tests::http::{Response, open, request};

use crate::support::{Server, Setup};

fn ask(
    server: &Server,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> Response {
    open(server.address, &request(method, path, headers, body)).finish()
}

fn allowing(setup: Setup, origins: &[&str]) -> Server {
    let mut setup = setup;
    let origins: Vec<String> = origins.iter().map(|&text| text.to_owned()).collect();
    setup.server.origins = Origins::parse(&origins).unwrap();
    setup.start()
}

const APP: &str = "https://app.example.org";

#[test]
fn a_page_that_is_allowed_asks_first_and_reads_the_answer() {
    let server = allowing(Setup::with_keys("secret"), &[APP, "app://obsidian.md"]);
    let asked = "authorization,content-type,x-stainless-lang,x-of-next-year";
    let preflight = [
        ("Origin", APP),
        ("Access-Control-Request-Method", "POST"),
        ("Access-Control-Request-Headers", asked),
        ("Access-Control-Request-Private-Network", "true"),
    ];
    // It has no key.
    let answer = ask(&server, "OPTIONS", "/v1/chat/completions", &preflight, "");
    assert_eq!(answer.status, 204, "{}", answer.body);
    for (name, value) in [
        ("access-control-allow-origin", APP),
        ("access-control-allow-methods", "POST"),
        ("access-control-allow-headers", asked),
        ("access-control-allow-private-network", "true"),
        ("access-control-max-age", "600"),
    ] {
        assert_eq!(answer.header(name), Some(value), "{name}");
    }
    assert_eq!(answer.header("access-control-allow-credentials"), None);
    let body = r#"{"prompt": "One day", "max_tokens": 2}"#;
    let key = ("Authorization", "Bearer secret");
    let answer = ask(
        &server,
        "POST",
        "/v1/completions",
        &[("Origin", APP), key],
        body,
    );
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert_eq!(answer.header("access-control-allow-origin"), Some(APP));
    assert_eq!(answer.header("access-control-expose-headers"), Some("*"));
    // It reads why it is refused, too.
    let refused = ask(
        &server,
        "GET",
        "/v1/models",
        &[("Origin", "app://obsidian.md")],
        "",
    );
    assert_eq!(refused.status, 401);
    let origin = refused.header("access-control-allow-origin");
    assert_eq!(origin, Some("app://obsidian.md"));
}

#[test]
fn pages_that_are_not_allowed_get_no_headers() {
    let server = allowing(Setup::default(), &[APP]);
    for origin in ["https://evil.example", "null", "http://app.example.org"] {
        let preflight = [
            ("Origin", origin),
            ("Access-Control-Request-Method", "POST"),
        ];
        let answer = ask(&server, "OPTIONS", "/v1/chat/completions", &preflight, "");
        assert_eq!(answer.status, 403, "{origin}");
        assert_eq!(answer.header("access-control-allow-origin"), None);
        let answer = ask(&server, "GET", "/v1/models", &[("Origin", origin)], "");
        assert_eq!(answer.status, 403, "{origin}");
        assert!(answer.body.contains("--allow-origin"), "{}", answer.body);
        assert_eq!(answer.header("access-control-allow-origin"), None);
    }
    // What an allowed page may do it may not do under another name of this machine.
    let rebound = [("Host", "evil.example"), ("Origin", APP)];
    assert_eq!(ask(&server, "GET", "/v1/models", &rebound, "").status, 403);
    let preflight = [
        rebound[0],
        rebound[1],
        ("Access-Control-Request-Method", "POST"),
    ];
    assert_eq!(
        ask(&server, "OPTIONS", "/v1/models", &preflight, "").status,
        403
    );
    // OPTIONS of something that is no browser is what it was.
    assert_eq!(ask(&server, "OPTIONS", "/v1/models", &[], "").status, 405);
}

#[test]
fn all_pages_are_allowed_by_a_star() {
    let server = allowing(Setup::default(), &["*"]);
    for headers in [
        [("Origin", "null"), ("Host", "localhost")],
        [("Origin", "https://any.example"), ("Host", "127.0.0.1")],
        [("Sec-Fetch-Site", "cross-site"), ("Host", "localhost")],
    ] {
        let answer = ask(&server, "GET", "/v1/models", &headers, "");
        assert_eq!(answer.status, 200, "{headers:?}");
    }
}

/// The headers that Caddy and nginx send on: the public name as the Host, and the page's own
/// origin.
#[test]
fn a_proxy_is_served_under_the_name_that_is_allowed() {
    let mut setup = Setup::default();
    setup.server.hosts = HostCheck::Names(vec!["example.org".to_owned()]);
    let server = setup.start();
    let body = r#"{"prompt": "One day", "max_tokens": 2, "stream": true}"#;
    let proxied = [
        ("Host", "example.org"),
        ("Origin", "https://example.org"),
        ("X-Forwarded-For", "203.0.113.9"),
        ("X-Forwarded-Proto", "https"),
        ("Sec-Fetch-Site", "same-origin"),
    ];
    let answer = ask(&server, "POST", "/v1/completions", &proxied, body);
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert_eq!(answer.header("x-accel-buffering"), Some("no"));
    assert!(answer.events().len() > 2);
    for name in ["example.com", "www.example.org"] {
        let answer = ask(&server, "GET", "/v1/models", &[("Host", name)], "");
        assert_eq!(answer.status, 403);
        assert!(answer.body.contains("--allow-host"), "{}", answer.body);
    }
    let other = [("Host", "example.org"), ("Origin", "https://evil.example")];
    assert_eq!(ask(&server, "GET", "/v1/models", &other, "").status, 403);
}
