// The server's API key: kept for this tab, never in an address.

const NAME = "pagoda-key";

export const hasKey = () => Boolean(sessionStorage.getItem(NAME));
export const setKey = (key) => sessionStorage.setItem(NAME, key);
export const forgetKey = () => sessionStorage.removeItem(NAME);

export function headers() {
  const key = sessionStorage.getItem(NAME);
  return key ? { Authorization: `Bearer ${key}` } : {};
}
