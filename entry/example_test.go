package entry_test

import (
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"time"

	"github.com/golang-jwt/jwt/v5"

	"github.com/bulkaction/bulkaction/entry"
)

var brokerKey = ed25519.NewKeyFromSeed([]byte("the seed of these examples only!"))

// newToken does what a broker does when it admits user-7.
func newToken(issuer string) string {
	now := time.Now()
	token := jwt.NewWithClaims(jwt.SigningMethodEdDSA, jwt.MapClaims{
		"iss": issuer, "aud": "spring-sale", "sub": "user-7", "evt": "spring-sale", "jti": "17",
		"iat": now.Unix(), "exp": now.Add(5 * time.Minute).Unix(),
	})
	token.Header["kid"] = "key-1"
	signed, err := token.SignedString(brokerKey)
	if err != nil {
		log.Fatal(err)
	}
	return signed
}

// startBroker serves the public keys, as brokers do.
func startBroker() *httptest.Server {
	x := base64.RawURLEncoding.EncodeToString(brokerKey.Public().(ed25519.PublicKey))
	return httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `{"keys": [{"kty": "OKP", "crv": "Ed25519", "kid": "key-1", "x": %q}]}`, x)
	}))
}

// Only users with an entry token reach the shop.
func ExampleVerifier_Middleware() {
	broker := startBroker()
	defer broker.Close()

	verifier, err := entry.New(context.Background(), entry.Config{
		PublicURL: broker.URL, // BULKACTION_BROKER_PUBLIC_URL
		Event:     "spring-sale",
		Leeway:    2 * time.Second,
	})
	if err != nil {
		log.Fatal(err)
	}
	shop := verifier.Middleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		claims, _ := entry.FromContext(r.Context())
		fmt.Fprintln(w, "welcome,", claims.User)
	}))

	visit := func(cookie *http.Cookie) {
		r := httptest.NewRequest(http.MethodGet, "/buy", nil)
		r.Header.Set("Accept", "text/html")
		if cookie != nil {
			r.AddCookie(cookie)
		}
		w := httptest.NewRecorder()
		shop.ServeHTTP(w, r)
		if w.Code == http.StatusFound {
			fmt.Println("sent to the waiting page:", w.Header().Get("Location") == verifier.WaitURL())
			return
		}
		fmt.Print(w.Code, " ", w.Body)
	}
	visit(nil)
	visit(&http.Cookie{Name: entry.CookieName("spring-sale"), Value: newToken(broker.URL)})
	// Output:
	// sent to the waiting page: true
	// 200 welcome, user-7
}

// A program that is no HTTP server checks tokens itself. Here it has the keys already.
func ExampleVerifier_Verify() {
	verifier, err := entry.New(context.Background(), entry.Config{
		PublicURL: "https://tickets.example.com",
		Event:     "winter-sale",
		Keys:      []ed25519.PublicKey{brokerKey.Public().(ed25519.PublicKey)},
	})
	if err != nil {
		log.Fatal(err)
	}
	_, err = verifier.Verify(context.Background(), "not a token")
	fmt.Println(err)
	// Output: the entry token is not valid: token is malformed
}

// A shop that has sold a seat ends the user's entry, so that the next user is admitted.
func ExampleClient_Complete() {
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		fmt.Println(r.URL.Path, string(body))
		fmt.Fprintln(w, `{"done": true}`)
	}))
	defer api.Close()

	client, err := entry.NewClient(api.URL, nil)
	if err != nil {
		log.Fatal(err)
	}
	token := "eyJ…" // entry.Token(r.Context()) behind the middleware
	done, err := client.Complete(context.Background(), token, true)
	fmt.Println(done, err)
	// Output:
	// /v1/entry-tokens/complete {"sold":true,"token":"eyJ…"}
	// true <nil>
}
