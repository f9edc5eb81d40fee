//! How a registry is shown who asks: not at all, by password, or by tokens that a server of its choice gives for them
//! (the "token" and "OAuth2" specifications of CNCF distribution).

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use base64::Engine as _;
use serde::Deserialize;
use ureq::http::{HeaderMap, Request};
use url::Url;

use super::Error;
use super::client::{request_fault, without_query};
use super::credentials::{self, Credential, CredentialSettings};
use crate::http::Client;

/// Most bytes of a token server's answer.
const LARGEST_TOKEN: u64 = 1 << 20;
/// What is meant where a token server does not say how long a token is good for, and the most that is believed.
const USUAL_LIFE: u64 = 60;
const LONGEST_LIFE: u64 = 3600;
/// A token is renewed this long before its end, or halfway there, so that it does not end on the way.
const EARLY: Duration = Duration::from_secs(10);

/// What a request wants to do.
#[derive(Debug, Clone, Copy)]
pub(super) enum Scope<'a> {
    Pull,
    Push,
    /// Push, and take blobs from this other repository.
    Mount(&'a str),
}

/// Who asks a registry about one repository.
pub(super) struct Auth {
    host: String,
    repository: String,
    /// Whether a token server may be spoken to without TLS.
    plain: bool,
    settings: CredentialSettings,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    scheme: Scheme,
    /// Looked up when it is first needed.
    credential: Option<Option<Credential>>,
    /// By scope.
    tokens: BTreeMap<String, Token>,
    /// Scopes that the registry has asked for by itself.
    asked: BTreeSet<String>,
}

#[derive(Default, Clone)]
enum Scheme {
    #[default]
    None,
    Basic,
    Bearer {
        realm: Url,
        service: Option<String>,
    },
}

struct Token {
    text: String,
    good_until: Instant,
}

#[derive(Deserialize)]
struct TokenAnswer {
    token: Option<String>,
    access_token: Option<String>,
    expires_in: Option<u64>,
}

impl Auth {
    pub(super) fn new(host: &str, repository: &str, plain: bool, settings: CredentialSettings) -> Self {
        Self {
            host: host.to_owned(),
            repository: repository.to_owned(),
            plain,
            settings,
            state: Mutex::default(),
        }
    }

    /// Takes note of an answer with status 401 to a request that showed `used`.
    ///
    /// # Errors
    /// When there is nothing else that could be shown.
    pub(super) fn challenged(&self, url: &Url, headers: &HeaderMap, used: Option<&str>) -> Result<(), Error> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let wrong = |message: &str| Error::Answer { url: without_query(url), message: message.to_owned() };
        let mut basic = false;
        let mut bearer = None;
        for value in headers.get_all("www-authenticate") {
            let value = value.to_str().map_err(|_| wrong("its WWW-Authenticate header is not text"))?;
            let challenges = http_auth::parse_challenges(value)
                .map_err(|_| wrong("its WWW-Authenticate header cannot be read"))?;
            for challenge in challenges {
                let parameter = |name: &str| {
                    let mut all = challenge.params.iter();
                    all.find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.to_unescaped())
                };
                if challenge.scheme.eq_ignore_ascii_case("bearer") {
                    bearer = bearer.or(Some((parameter("realm"), parameter("service"), parameter("scope"))));
                } else if challenge.scheme.eq_ignore_ascii_case("basic") {
                    basic = true;
                }
            }
        }
        if let Some((realm, service, scope)) = bearer {
            let realm = realm
                .and_then(|realm| Url::parse(&realm).ok())
                .ok_or_else(|| wrong("it names no token server"))?;
            if realm.scheme() != "https" && !(realm.scheme() == "http" && self.plain) {
                return Err(Error::Place {
                    url: without_query(url),
                    to: without_query(&realm),
                    message: "a token server that would be shown credentials without TLS",
                });
            }
            // Another thread may have renewed the token meanwhile.
            state.tokens.retain(|_, token| used != Some(format!("Bearer {}", token.text).as_str()));
            state.asked.extend(scope.filter(|scope| !scope.is_empty()));
            state.scheme = Scheme::Bearer { realm, service };
        } else if basic {
            state.scheme = Scheme::Basic;
        } else {
            return Err(wrong("it asks for credentials in no way that is known; known are Basic and Bearer"));
        }
        Ok(())
    }

    /// The value of the header Authorization.
    ///
    /// # Errors
    /// When credentials are needed and there are none, or a token server gives none for them.
    pub(super) fn authorization(&self, client: &Client, scope: Scope<'_>) -> Result<Option<String>, Error> {
        // Held while a token is fetched: the others wait for it.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let scheme = state.scheme.clone();
        if matches!(scheme, Scheme::None) {
            return Ok(None);
        }
        let credential = match &state.credential {
            Some(known) => known.clone(),
            None => {
                let found = credentials::find(&self.settings, &self.host, &self.repository)?;
                state.credential.insert(found).clone()
            }
        };
        if let Some(Credential::Bearer(token)) = &credential {
            return Ok(Some(format!("Bearer {token}")));
        }
        let Scheme::Bearer { realm, service } = scheme else {
            return match &credential {
                Some(Credential::Password { user, password }) => Ok(Some(basic(user, password))),
                _ => Err(self.unauthorized(credential.is_some())),
            };
        };
        let scopes = self.scopes(scope, &state.asked);
        let key = scopes.join(" ");
        if let Some(token) = state.tokens.get(&key).filter(|token| token.good_until > Instant::now()) {
            return Ok(Some(format!("Bearer {}", token.text)));
        }
        let token = self.token(client, &realm, service.as_deref(), &scopes, credential.as_ref())?;
        let shown = format!("Bearer {}", token.text);
        state.tokens.insert(key, token);
        Ok(Some(shown))
    }

    pub(super) fn unauthorized(&self, shown: bool) -> Error {
        Error::Unauthorized { host: self.host.clone(), repository: self.repository.clone(), shown }
    }

    /// Whether there are credentials that have been looked up and shown.
    pub(super) fn has_credential(&self) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        matches!(state.credential, Some(Some(_)))
    }

    fn scopes(&self, scope: Scope<'_>, asked: &BTreeSet<String>) -> Vec<String> {
        let actions = if matches!(scope, Scope::Pull) { "pull" } else { "pull,push" };
        let mut scopes = vec![format!("repository:{}:{actions}", self.repository)];
        if let Scope::Mount(from) = scope {
            scopes.push(format!("repository:{from}:pull"));
        }
        let more: Vec<String> = asked.iter().filter(|asked| !is_covered(asked, &scopes)).cloned().collect();
        scopes.extend(more);
        scopes
    }

    /// Gets a token.
    fn token(
        &self,
        client: &Client,
        realm: &Url,
        service: Option<&str>,
        scopes: &[String],
        credential: Option<&Credential>,
    ) -> Result<Token, Error> {
        let started = Instant::now();
        let form;
        let mut url = realm.clone();
        let request = if let Some(Credential::Identity(refresh)) = credential {
            form = url::form_urlencoded::Serializer::new(String::new())
                .append_pair("grant_type", "refresh_token")
                .append_pair("client_id", "trainyard")
                .append_pair("service", service.unwrap_or(&self.host))
                .append_pair("scope", &scopes.join(" "))
                .append_pair("refresh_token", refresh)
                .finish();
            Request::post(url.as_str())
                .header("content-type", "application/x-www-form-urlencoded")
                .header("content-length", form.len())
        } else {
            form = String::new();
            let mut query = url.query_pairs_mut();
            service.map(|service| query.append_pair("service", service));
            for scope in scopes {
                query.append_pair("scope", scope);
            }
            if let Some(Credential::Password { user, .. }) = credential {
                query.append_pair("account", user);
            }
            drop(query);
            let request = Request::get(url.as_str());
            match credential {
                Some(Credential::Password { user, password }) => {
                    request.header("authorization", basic(user, password))
                }
                _ => request,
            }
        };
        let request = request.header("accept", "application/json").header("accept-encoding", "identity");
        let mut bytes = form.as_bytes();
        let body: Option<&mut dyn Read> = if form.is_empty() { None } else { Some(&mut bytes) };
        let request = request.body(()).map_err(|_| request_fault(realm))?;
        let mut response = client.send(request, body, 1)?;
        let status = response.status().as_u16();
        if matches!(status, 400 | 401 | 403) {
            return Err(self.unauthorized(credential.is_some()));
        }
        if status != 200 {
            let retry_after = crate::http::retry_after(response.headers());
            return Err(Error::Refused {
                url: without_query(realm),
                status,
                said: String::new(),
                retry_after,
            });
        }
        let mut bytes = Vec::new();
        let wrong = |message: &str| Error::Answer { url: without_query(realm), message: message.to_owned() };
        response.body_mut().as_reader().take(LARGEST_TOKEN).read_to_end(&mut bytes).map_err(|source| {
            Error::Http(crate::http::Error::Body { url: without_query(realm), received: 0, source })
        })?;
        // What serde_json says may hold the token.
        let answer: TokenAnswer =
            serde_json::from_slice(&bytes).map_err(|_| wrong("its answer is not JSON with a token"))?;
        let text = [answer.token, answer.access_token].into_iter().flatten().find(|text| !text.is_empty());
        let text = text.ok_or_else(|| wrong("its answer holds no token"))?;
        if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(wrong("its token holds what no token may"));
        }
        let life = Duration::from_secs(answer.expires_in.unwrap_or(USUAL_LIFE).min(LONGEST_LIFE));
        Ok(Token { text, good_until: started + life - EARLY.min(life / 2) })
    }
}

/// Whether a scope, as `repository:<name>:<actions>`, is part of one of others.
fn is_covered(asked: &str, scopes: &[String]) -> bool {
    let Some((what, actions)) = asked.rsplit_once(':') else { return false };
    scopes.iter().filter_map(|scope| scope.rsplit_once(':')).any(|(known, allowed)| {
        known == what && actions.split(',').all(|action| allowed.split(',').any(|one| one == action))
    })
}

fn basic(user: &str, password: &str) -> String {
    let pair = format!("{user}:{password}");
    format!("Basic {}", base64::engine::general_purpose::STANDARD.encode(pair))
}

#[cfg(test)]
mod tests {
    use super::is_covered;

    #[test]
    fn scopes_that_are_asked_for_anyway_are_not_asked_for_twice() {
        let scopes = ["repository:a/b:pull,push".to_owned(), "repository:c:pull".to_owned()];
        for (asked, covered) in [
            ("repository:a/b:push,pull", true),
            ("repository:a/b:pull", true),
            ("repository:c:pull", true),
            ("repository:c:pull,push", false),
            ("repository:a/b:delete", false),
            ("repository:a:pull", false),
            ("registry:catalog:*", false),
            ("whatever", false),
        ] {
            assert_eq!(is_covered(asked, &scopes), covered, "{asked}");
        }
    }
}
